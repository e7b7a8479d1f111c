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
    device = weight.device.type
    # Asked first: the meta device, on which a run is planned, knows no autocast.
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


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


class _TwoStreamNorm(torch.autograd.Function):
    """x^ = g x / rms(x) by the base's own norm, and u^ = g' u / rms(x).

    With a = g dx^, b = g' du^ and i = 1 / rms(x): du = i b, and dx = i a - x i^3 (a.x + b.u) / D.
    """

    @staticmethod
    def forward(ctx: Any, base_norm: Any, x_BTD: Tensor, u_BTE: Tensor, gain_E: Tensor) -> tuple[Tensor, Tensor]:
        inverse_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=torch.float32)
        inverse_BT1 = inverse_BT1.square_().div_(x_BTD.shape[-1]).add_(base_norm.variance_epsilon).rsqrt_()
        normed_x = base_norm(x_BTD)
        normed_u = (gain_E * (u_BTE.float() * inverse_BT1)).to(product_dtype(u_BTE))
        x_wanted = ctx.needs_input_grad[1]
        ctx.set_materialize_grads(x_wanted)
        if not x_wanted:
            ctx.mark_non_differentiable(normed_x)
        ctx.save_for_backward(x_BTD if x_wanted else None, u_BTE, inverse_BT1, base_norm.weight, gain_E)
        return normed_x, normed_u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_u: Tensor) -> tuple[Tensor | None, ...]:
        x, u, inverse, base_gain, gain = ctx.saved_tensors
        scaled_u = u.float() * inverse
        of_gain = (grad_u * scaled_u).sum(dim=(0, 1)).to(gain.dtype)
        of_u = (grad_u * gain).mul_(inverse)
        of_x = None
        if x is not None:
            a = grad_x.float() * base_gain
            # b.u i = du.u, so that both sums are already one factor i ahead.
            both = (a * x).sum(dim=-1, keepdim=True).mul_(inverse) + (of_u * u).sum(dim=-1, keepdim=True)
            of_x = a.mul_(inverse).addcmul_(x.float(), both.mul_(inverse.square()).div_(x.shape[-1]), value=-1)
            of_x = of_x.to(x.dtype)
        return None, of_x, of_u.to(u.dtype), of_gain


def two_stream_norm(base_norm: Any, x_BTD: Tensor, u_BTE: Tensor, gain_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return both streams over the base stream's RMS, each with its own gains; u^ as the products that read it want it.

    Args:
        base_norm: the base's RMSNorm: frozen.
        x_BTD: base stream.
        u_BTE: expansion stream.
        gain_E: g', the expansion's gains.
    """
    return _TwoStreamNorm.apply(base_norm, x_BTD, u_BTE, gain_E)


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
