"""Steps of the widened decoder whose own backward pass costs less than what autograd would record of them.

Each computes forward with the base's own operations, so that the base stream keeps its bits, and keeps for backward
only what cannot be had again by a cheap elementwise operation.

Shapes: B batch, T positions, D base channels, E expansion channels, C MLP channels, N heads, A channels a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return what a product with a weight is computed in: autocast's dtype, or the weight's own."""
    # The meta device, on which a run is planned, knows no autocast.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return weight.dtype
    return torch.get_autocast_dtype(weight.device.type)


def add_product(y: Tensor, u: Tensor, weight: Tensor) -> Tensor:
    """Return y + W u, summed inside the product where precisions allow; y, a fresh product, is overwritten then.

    Args:
        y: (rows, out).
        u: (rows, in).
        weight: (out, in).
    """
    if y.dtype == product_dtype(weight):
        return y.addmm_(u.to(y.dtype), weight.to(y.dtype).T)
    return y + F.linear(u.to(weight.dtype), weight).to(y.dtype)


class _FrozenNorm(torch.autograd.Function):
    """x^ = g x / rms(x) by the base's own norm, and i = 1 / rms(x).

    With a = g dx^: dx = i a - x i^3 (a.x + di) / D.
    """

    @staticmethod
    def forward(ctx: Any, base_norm: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        norms_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=wide).float()
        inverse_BT1 = norms_BT1.square_().div_(x_BTD.shape[-1]).add_(base_norm.variance_epsilon).rsqrt_()
        ctx.save_for_backward(x_BTD, inverse_BT1, base_norm.weight)
        return base_norm(x_BTD), inverse_BT1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_inverse: Tensor) -> tuple[None, Tensor]:
        x, inverse, gain = ctx.saved_tensors
        a = grad_x.float() * gain
        inner = (a * x).sum(dim=-1, keepdim=True).add_(grad_inverse)
        of_x = a.mul_(inverse).addcmul_(x.float(), inner.mul_(inverse.pow(3)).div_(x.shape[-1]), value=-1)
        return None, of_x.to(x.dtype)


def frozen_norm(base_norm: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return x^, and 1 / rms(x) as (B, T, 1) in float32, by which the expansion stream is normalised too.

    Args:
        base_norm: the base's RMSNorm; its gains get no gradient.
        x_BTD: base stream.
    """
    return _FrozenNorm.apply(base_norm, x_BTD)


class _Rotation(torch.autograd.Function):
    """Transformers' rotary embedding; a rotation's gradient is turned back by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return apply_rotary_pos_emb(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_q, of_k = apply_rotary_pos_emb(grad_q, grad_k, cos, -sin)
        return of_q, of_k, None, None


def rotate(q_BNTA: Tensor, k_BNTA: Tensor, cos_BTA: Tensor, sin_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys turned by their positions' angles."""
    return _Rotation.apply(q_BNTA, k_BNTA, cos_BTA, sin_BTA)


class _GatedSilu(torch.autograd.Function):
    """silu(gate) up, keeping gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def gated(act_fn: Any, gate_BTC: Tensor, up_BTC: Tensor) -> Tensor:
    """Return act(gate) up, the MLP's channels, by the base's activation function."""
    if isinstance(act_fn, SiLUActivation):
        return _GatedSilu.apply(gate_BTC, up_BTC)
    return act_fn(gate_BTC) * up_BTC
