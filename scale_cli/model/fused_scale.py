"""Steps of the widened decoder with a backward pass of their own, cheaper than the one that
autograd would record.

Each forward pass uses the base's own operations, so that the base stream keeps its bits. It saves
for backward only what a cheap elementwise operation cannot compute again.

Shapes: B batch, T positions, D base channels, E expansion channels, C MLP channels, N heads, A
channels a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a product with a weight is computed: autocast's, or the weight's
    own.
    """
    # The meta device, on which a run is planned, has no autocast.
    if weight.is_meta or not torch.is_autocast_enabled(weight.device.type):
        return weight.dtype
    return torch.get_autocast_dtype(weight.device.type)


class _Cast(torch.autograd.Function):
    """Casts tensors to a lower precision, all in one kernel, and their gradients back to their own
    in another.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        lowered = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(lowered, weights)
        return tuple(lowered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_weights = [
            torch.empty_like(grad, dtype=dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        torch._foreach_copy_(of_weights, grads)
        return None, *of_weights


def cast_for_products(weights: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return a dict from each weight to itself in the dtype in which its products are computed."""
    read = {weight: weight for weight in weights}
    higher = [weight for weight in read if weight.dtype != product_dtype(weight)]
    if torch.compiler.is_compiling():  # it fuses the casts with the operations that read them
        return read | {weight: weight.to(product_dtype(weight)) for weight in higher}
    if higher:
        read |= zip(higher, _Cast.apply(product_dtype(higher[0]), *higher), strict=True)
    return read


def add_product(y: Tensor, u: Tensor, weight: Tensor) -> Tensor:
    """Return y + W u for y (rows, out) and u (rows, in); if the precisions agree, y is overwritten."""
    if y.dtype == product_dtype(weight):
        return y.addmm_(u.to(y.dtype), weight.to(y.dtype).T)
    return y + F.linear(u.to(weight.dtype), weight).to(y.dtype)


@dataclass(frozen=True)
class NormForm:
    """How a family's RMSNorm module stores its parameters."""

    epsilon: str = "variance_epsilon"  # name of the module's attribute
    offset: float = 0.0  # a gain is the stored weight plus this

    def gains(self, weight: Tensor) -> Tensor:
        return weight.float() + self.offset if self.offset else weight

    def weight(self, gains: Tensor) -> Tensor:
        return gains - self.offset


LLAMA_NORM = NormForm()


class _FrozenNorm(torch.autograd.Function):
    """x^ = g x / rms(x) by the base's own norm, and i = 1 / rms(x).

    With a = g dx^: dx = i a - x i^3 (a.x + di) / D.
    """

    @staticmethod
    def forward(ctx: Any, base_norm: Any, form: NormForm, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        norms_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=wide).float()
        inverse_BT1 = (
            norms_BT1.square_()
            .div_(x_BTD.shape[-1])
            .add_(getattr(base_norm, form.epsilon))
            .rsqrt_()
        )
        ctx.save_for_backward(x_BTD, inverse_BT1, form.gains(base_norm.weight))
        return base_norm(x_BTD), inverse_BT1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_inverse: Tensor) -> tuple[None, None, Tensor]:
        x, inverse, gain = ctx.saved_tensors
        a = grad_x.float() * gain
        inner = (a * x).sum(dim=-1, keepdim=True).add_(grad_inverse)
        of_x = a.mul_(inverse).addcmul_(
            x.float(), inner.mul_(inverse.pow(3)).div_(x.shape[-1]), value=-1
        )
        return None, None, of_x.to(x.dtype)


# Returns x^ by the base's RMSNorm, whose gains get no gradient, and 1 / rms(x) as (B, T, 1) in
# float32.
frozen_norm: Callable[[Any, NormForm, Tensor], tuple[Tensor, Tensor]] = _FrozenNorm.apply


class _Rotation(torch.autograd.Function):
    """Transformers' rotary embedding, bit for bit; the gradient is rotated by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, signed_sin)
        joined = torch.cat([q, k], dim=2)
        across = joined.roll(joined.shape[-1] // 2, dims=-1) * signed_sin
        return _apart((joined * cos).add_(across), q.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, signed_sin = ctx.saved_tensors
        joined = torch.cat([grad_q.transpose(1, 2), grad_k.transpose(1, 2)], dim=2)
        across = joined.roll(joined.shape[-1] // 2, dims=-1) * signed_sin
        of_q, of_k = _apart((joined * cos).sub_(across), grad_q.shape[1])
        return of_q.transpose(1, 2), of_k.transpose(1, 2), None, None


def _apart(joined_BTNA: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
    joined_BNTA = joined_BTNA.transpose(1, 2)
    return joined_BNTA[:, :num_queries], joined_BNTA[:, num_queries:]


def rotate(
    q_BTNA: Tensor, k_BTNA: Tensor, embeddings: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (B, N, T, A) queries and keys rotated by their positions' `angles`, as
    `rotation_angles` gives them.

    Compiled code uses the base's own function of its `embeddings`: sums compiled from another might
    round differently. The angles of some families are float32 in any model, which then casts back.
    """
    if torch.compiler.is_compiling():
        turned = apply_rotary_pos_emb(q_BTNA.transpose(1, 2), k_BTNA.transpose(1, 2), *embeddings)
    else:
        turned = _Rotation.apply(q_BTNA, k_BTNA, *angles)
    return turned[0].to(q_BTNA.dtype), turned[1].to(k_BTNA.dtype)


def rotation_angles(cos_BTA: Tensor, sin_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, T, 1, A) cosines, and the signed sines that multiply the other half of a head's
    channels.
    """
    first, second = sin_BTA.chunk(2, dim=-1)
    return cos_BTA.unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


class _GatedSilu(torch.autograd.Function):
    """silu(gate) up; saves only gate and up for backward."""

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
