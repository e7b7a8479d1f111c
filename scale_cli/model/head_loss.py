"""Cross-entropy of a vocabulary head in chunks: the (tokens x vocabulary) logits never exist whole.

With distillation from the base, the loss of a token is -log p(target) + w KL(p_base || p), and its
gradient by the logits is p - one-hot + w (p - p_base). The base's logits are the sum before the
last head is added, so they cost no extra product.

Shapes: N tokens of the text, S of them in one sequence, D base channels, E expansion channels, V
vocabulary, M new tokens, which the base's vocabulary lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_scale import product_dtype
from .routing import rows_at_once

IGNORED = -100  # as in data/batches.py, which this file cannot import because it is exported
# Maps a base's logits of the tokens that it has to logits of all tokens, new ones included.
OfBase = Callable[[Tensor], Tensor]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target) under the logits of some heads; forward computes the gradients too.

    The heads are H; or H and H'; or H, H_new and H', where H_new gives the logits of the tokens
    that H lacks. `distilled` holds slices of the N tokens, each with a weight for its KL divergence
    from the predictions without H'. Gradients are computed only where they are needed: a frozen
    head costs one product and keeps nothing. `token_losses_N`, if given, is filled with every
    token's term of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets_N: Tensor,
        distilled: Sequence[tuple[slice, float]],
        token_losses_N: Tensor | None,
        of_base: OfBase | None,
        *streams_and_heads: Tensor,
    ) -> Tensor:
        streams = streams_and_heads[::2]
        heads = streams_and_heads[1::2]
        device = targets_N.device
        wanted = ctx.needs_input_grad[4:]
        of_streams = [
            torch.empty_like(x) if want else None
            for x, want in zip(streams, wanted[::2], strict=True)
        ]
        of_heads = [
            torch.zeros_like(head, dtype=torch.float32) if want else None
            for head, want in zip(heads, wanted[1::2], strict=True)
        ]
        lowered = [head.to(product_dtype(head)) for head in heads]
        loss = torch.zeros((), device=device)
        losses_N = token_losses_N
        if losses_N is None:
            losses_N = torch.empty(len(targets_N), device=device)

        # Allocated once: a chunk's log-probabilities, and its gradient in the precision of the
        # products that read it.
        num_rows = rows_at_once(device.type, len(lowered[-1]))
        num_held = min(num_rows, len(targets_N))
        log_probs_MV = torch.empty(num_held, len(lowered[-1]), device=device)
        grad_MV = log_probs_MV
        lowest = lowered[-1].dtype
        of_one_dtype = all(head.dtype == lowest for head in lowered)
        if lowest != torch.float32 and of_one_dtype and not distilled:
            grad_MV = torch.empty_like(log_probs_MV, dtype=lowest)

        ignored_N1 = (targets_N == IGNORED).unsqueeze(1)
        places_N1 = targets_N.unsqueeze(1).masked_fill(ignored_N1, 0)
        rows_M1 = torch.arange(num_held, device=device).unsqueeze(1)

        for start in range(0, len(targets_N), num_rows):
            rows = slice(start, start + num_rows)
            read = [
                stream[rows].to(head.dtype) for stream, head in zip(streams, lowered, strict=True)
            ]
            grad_NV = grad_MV[: len(read[0])]
            ignored = ignored_N1[rows]
            _fill(
                losses_N[rows],
                grad_NV,
                log_probs_MV[: len(grad_NV)],
                read,
                lowered,
                targets=(rows_M1[: len(grad_NV)], places_N1[rows], ignored),
                distilled=list(_within(distilled, rows)),
                of_base=of_base,
            )
            loss += losses_N[rows].sum()

            here = [None if grad is None else grad[rows] for grad in of_streams]
            _add_gradients(here, of_heads, grad_NV, ignored, read, lowered)
        ends = [
            None if grad is None else grad.to(head.dtype)
            for grad, head in zip(of_heads, heads, strict=True)
        ]
        ctx.save_for_backward(
            *(grad for pair in zip(of_streams, ends, strict=True) for grad in pair)
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nothing else uses them, and autograd refuses a second backward pass.
        grads = [None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        return None, None, None, None, *grads


def _logits_and_bases(
    streams: Sequence[Tensor],
    heads: Sequence[Tensor],
    places: Sequence[slice],
    of_base: OfBase | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return sum_k H_k x_k, and, at `places`, the base's float32 log-probabilities."""
    logits_NV = streams[0] @ heads[0].T
    if len(heads) == 1:
        return logits_NV, []

    said = [logits_NV[place].float() for place in places]
    if of_base is not None:
        said = [of_base(logits_SV) for logits_SV in said]
    bases = [logits_SV.log_softmax(dim=1) for logits_SV in said]

    if len(heads) == 3:
        logits_NV = torch.cat([logits_NV, streams[1] @ heads[1].T], dim=1)
    # A frozen bfloat16 head beside a float32 one is never upcast; only its logits are.
    return logits_NV.to(heads[-1].dtype).addmm_(streams[-1], heads[-1].T), bases


def _fill(
    losses_N: Tensor,
    grad_NV: Tensor,
    log_probs_NV: Tensor,
    streams: Sequence[Tensor],
    heads: Sequence[Tensor],
    *,
    targets: tuple[Tensor, Tensor, Tensor],
    distilled: Sequence[tuple[slice, float]],
    of_base: OfBase | None,
) -> None:
    """Compute the losses of some tokens, and their gradients by the logits.

    Args:
        losses_N: filled with the losses; 0 without a target.
        grad_NV: filled with the gradients; meaningless without a target; may be `log_probs_NV`.
        log_probs_NV: filled with log p, float32.
        streams: what each head reads, in the precision of its products.
        heads: as in `_ChunkedCrossEntropy`.
        targets: (N, 1) each: the numbers from 0 on; the targets' indices in the vocabulary; and
            True where there is no target.
        distilled: as in `_ChunkedCrossEntropy`, of these tokens.
        of_base: as in `trained_head_cross_entropy`.
    """
    rows_N1, places_N1, ignored_N1 = targets
    # In the precision of the products; a GPU kernel reads them without a cast.
    logits_NV, bases = _logits_and_bases(streams, heads, [some for some, _ in distilled], of_base)
    torch.log_softmax(logits_NV, dim=1, dtype=log_probs_NV.dtype, out=log_probs_NV)
    of_targets_N1 = log_probs_NV.gather(1, places_N1)
    torch.exp(log_probs_NV, out=grad_NV)
    # `scatter_` copies the whole matrix on a processor.
    grad_NV.index_put_(
        (rows_N1, places_N1), torch.expm1(of_targets_N1, out=grad_NV.new_empty(places_N1.shape))
    )
    torch.neg(of_targets_N1, out=losses_N.unsqueeze(1)).masked_fill_(ignored_N1, 0.0)
    for (some, weight), base_SV in zip(distilled, bases, strict=True):
        divergence_S, of_divergence_SV = _divergence_and_gradient(
            base_SV, logits_NV[some].float(), ignored_N1[some]
        )
        losses_N[some] += weight * divergence_S
        grad_NV[some].add_(of_divergence_SV, alpha=weight)


def _add_gradients(
    of_streams: Sequence[Tensor | None],
    of_heads: Sequence[Tensor | None],
    grad_NV: Tensor,
    ignored_N1: Tensor,
    streams: Sequence[Tensor],
    heads: Sequence[Tensor],
) -> None:
    """Fill some tokens' gradients of the streams, and add theirs to the heads', where one is
    wanted.
    """
    # Of each head, the columns of the logits that it adds to: its part of the vocabulary.
    columns = [slice(None)] * len(heads)
    if len(heads) == 3:
        columns = [slice(len(heads[0])), slice(len(heads[0]), None), slice(None)]
    grad = grad_NV
    for stream, head, own, of_stream, of_head in zip(
        streams, heads, columns, of_streams, of_heads, strict=True
    ):
        if grad.dtype != head.dtype:
            grad = grad_NV.to(head.dtype)
        if of_stream is not None:
            of_stream.copy_((grad[:, own] @ head).masked_fill_(ignored_N1, 0.0))
        if of_head is None:
            continue
        read = stream.masked_fill(ignored_N1, 0.0)
        if of_head.dtype == grad.dtype:
            of_head.addmm_(grad[:, own].T, read)
        else:
            of_head += grad[:, own].T @ read


def _divergence_and_gradient(
    base_SV: Tensor, logits_SV: Tensor, ignored_S1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return KL(p_base || p) and its gradient by the logits, p - p_base; both are 0 where there is
    no target.

    `base_SV` is log p_base, and is overwritten.
    """
    log_p_SV = logits_SV.log_softmax(dim=1)
    p_base_SV = base_SV.exp()
    divergence_S1 = base_SV.sub_(log_p_SV).mul_(p_base_SV).sum(dim=1, keepdim=True)
    gradient_SV = log_p_SV.exp_().sub_(p_base_SV).mul_(~ignored_S1)
    return divergence_S1.masked_fill_(ignored_S1, 0.0).squeeze(1), gradient_SV


def _within(places: Sequence[tuple[slice, float]], rows: slice) -> Iterator[tuple[slice, float]]:
    """Yield the parts of `places` that lie within `rows`, as slices relative to the first of these
    rows.
    """
    for place, weight in places:
        start = max(place.start, rows.start)
        stop = min(place.stop, rows.stop)
        if start < stop:
            yield slice(start - rows.start, stop - rows.start), weight


def trained_head_cross_entropy(
    x_BTD: Tensor,
    u_BTE: Tensor,
    base_head_VD: Tensor,
    head_VE: Tensor,
    targets_BT: Tensor,
    *,
    distillation: Sequence[float] | None = None,
    new_head_MD: Tensor | None = None,
    token_losses_BT: Tensor | None = None,
    of_base: OfBase | None = None,
) -> Tensor:
    """Return the summed cross-entropy of H x + H' u in float32, without IGNORED targets.

    Args:
        x_BTD: the base stream after its last norm.
        u_BTE: the expansion stream after its last norm.
        base_head_VD: H; frozen, it gets no gradient.
        head_VE: H'.
        targets_BT: the token after each position, or IGNORED.
        distillation: each sequence's weight of its KL divergence from the logits without H' u;
            None: 0 for all.
        new_head_MD: H_new, for the last M tokens of the vocabulary, which H lacks.
        token_losses_BT: filled with every target's term of the sum, if given.
        of_base: maps H x to the base's logits of all tokens; needed to distil a base that lacks
            some.
    """
    length = targets_BT.shape[1]
    distilled = [
        (slice(index * length, (index + 1) * length), weight)
        for index, weight in enumerate(distillation or ())
        if weight
    ]
    x_ND = x_BTD.flatten(0, 1)
    return _ChunkedCrossEntropy.apply(
        targets_BT.flatten(),
        distilled,
        None if token_losses_BT is None else token_losses_BT.view(-1),
        of_base,
        x_ND,
        base_head_VD.detach(),
        *(() if new_head_MD is None else (x_ND, new_head_MD)),
        u_BTE.flatten(0, 1),
        head_VE,
    )


def plain_cross_entropy(
    x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, token_losses_BT: Tensor | None = None
) -> Tensor:
    """Return the summed cross-entropy of H x in float32; H gets a gradient if it trains."""
    token_losses_N = None if token_losses_BT is None else token_losses_BT.view(-1)
    return _ChunkedCrossEntropy.apply(
        targets_BT.flatten(), (), token_losses_N, None, x_BTD.flatten(0, 1), head_VD
    )
