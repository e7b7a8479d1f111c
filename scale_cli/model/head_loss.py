"""Cross-entropy of a vocabulary head in chunks: the (tokens x vocabulary) logits never exist whole.

Shapes: N tokens, D base channels, E expansion channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_scale import product_dtype

IGNORED = -100

# Logits of one chunk, in elements: about what a CPU's caches hold, and enough to fill a GPU (256 MiB in float32).
_LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
# However large the vocabulary, a product over fewer rows would spend its time on reading the head.
_FEWEST_ROWS = 128


def rows_at_once(device_type: str, vocab_size: int) -> int:
    """Return how many tokens' logits one chunk holds."""
    return max(_FEWEST_ROWS, _LOGITS_AT_ONCE.get(device_type, 2**26) // vocab_size)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target) under the logits sum_k H_k x_k, with the gradients computed on the way forward.

    Only what wants a gradient gets one: a frozen head costs one product, and keeps nothing.
    """

    @staticmethod
    def forward(ctx: Any, targets_N: Tensor, *streams_and_heads: Tensor) -> Tensor:
        streams, heads = streams_and_heads[::2], streams_and_heads[1::2]
        device = targets_N.device.type
        wanted = ctx.needs_input_grad[1:]
        of_streams = [torch.empty_like(x) if want else None for x, want in zip(streams, wanted[::2], strict=True)]
        of_heads = [
            torch.zeros_like(head, dtype=torch.float32) if want else None
            for head, want in zip(heads, wanted[1::2], strict=True)
        ]
        lowered = [head.to(product_dtype(head)) for head in heads]
        loss = torch.zeros((), dtype=torch.float32, device=targets_N.device)
        num_rows = rows_at_once(device, len(lowered[0]))
        for start in range(0, len(targets_N), num_rows):
            rows = slice(start, start + num_rows)
            read = [stream[rows].to(head.dtype) for stream, head in zip(streams, lowered, strict=True)]
            logits_NV = read[0] @ lowered[0].T
            for stream, head in zip(read[1:], lowered[1:], strict=True):
                # A frozen bfloat16 head beside a float32 one is never upcast; its logits are.
                logits_NV = logits_NV.to(head.dtype).addmm_(stream, head.T)
            said, grad_NV = _said_and_gradient(logits_NV.float(), targets_N[rows])
            loss -= said
            grad = grad_NV
            for stream, head, of_stream, of_head in zip(read, lowered, of_streams, of_heads, strict=True):
                if grad.dtype != head.dtype:
                    grad = grad_NV.to(head.dtype)
                if of_stream is not None:
                    of_stream[rows] = grad @ head
                if of_head is not None:
                    _add_product(of_head, grad.T, stream)
        ends = [None if grad is None else grad.to(head.dtype) for grad, head in zip(of_heads, heads, strict=True)]
        ctx.save_for_backward(*(grad for pair in zip(of_streams, ends, strict=True) for grad in pair))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nobody else holds them, and autograd refuses a second backward over them.
        return None, *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors)


def _said_and_gradient(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed log p(target), and d loss / d logits: softmax - one-hot, 0 where there is no target.

    The logits are overwritten: one chunk's worth of memory, and one exponential.
    """
    counted_N1 = (targets_N != IGNORED).unsqueeze(1)
    places_N1 = targets_N.unsqueeze(1).where(counted_N1, 0)
    logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True))
    said_N1 = logits_NV.gather(1, places_N1)
    sums_N1 = logits_NV.exp_().sum(dim=1, keepdim=True)
    said = torch.where(counted_N1, said_N1 - sums_N1.log(), 0.0).sum()
    grad_NV = logits_NV.mul_(counted_N1 / sums_N1)
    return said, grad_NV.scatter_add_(1, places_N1, -counted_N1.to(grad_NV.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a float32 sum, in the product itself where the precisions agree."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def adaptation_cross_entropy(
    x_BTD: Tensor,
    u_BTE: Tensor,
    base_head_VD: Tensor,
    head_VE: Tensor,
    targets_BT: Tensor,
    between: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Return the summed cross-entropy of H x + H' u in float32, IGNORED targets left out.

    Args:
        x_BTD: the base stream after its last norm.
        u_BTE: the expansion stream after its last norm.
        base_head_VD: H; frozen, it gets no gradient.
        head_VE: H'.
        targets_BT: the token after each position, or IGNORED.
        between: streams and heads of the frozen expansions that this one stands upon, whose logits are added.
    """
    frozen = [tensor for u, head in between for tensor in (u.flatten(0, 1), head)]
    return _ChunkedCrossEntropy.apply(
        targets_BT.flatten(), x_BTD.flatten(0, 1), base_head_VD.detach(), *frozen, u_BTE.flatten(0, 1), head_VE
    )


def plain_cross_entropy(x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the summed cross-entropy of H x in float32; H gets a gradient where it trains."""
    return _ChunkedCrossEntropy.apply(targets_BT.flatten(), x_BTD.flatten(0, 1), head_VD)
