"""Cross-entropy of a vocabulary head in chunks: the (tokens x vocabulary) logits never exist whole.

With distillation from the base, the loss of a token is -log p(target) + w KL(p_base || p), and its
gradient by the logits is p - one-hot + w (p - p_base). The base's logits are the sum before the
last head is added, so they cost no extra product.

Shapes: N tokens of the text, C of them in a chunk, S in a distilled part of one, D base channels, E
expansion channels, V vocabulary, M new tokens, which the base's vocabulary lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_scale import product_dtype
from .routing import rows_at_once

IGNORED = -100  # as in data/batches.py, which this file cannot import because it is exported
# Maps a base's logits of the tokens that it has to logits of all tokens, new ones included.
OfBase = Callable[[Tensor], Tensor]
_EVERY_TOKEN = slice(None)


class _Product(NamedTuple):
    """A term of the logits, `stream @ head.T`, and its gradients, where they are wanted."""

    stream: Tensor
    head: Tensor  # in the precision of the product
    columns: slice  # the tokens of the vocabulary to whose logits it is added
    of_stream: Tensor | None
    of_head: Tensor | None  # summed over the chunks in float32

    def at(self, chunk: slice) -> _Product:
        """Return the product of a chunk's tokens."""
        return self._replace(
            stream=self.stream[chunk].to(self.head.dtype),
            of_stream=None if self.of_stream is None else self.of_stream[chunk],
        )


class _Targets(NamedTuple):
    """What follows each token of a chunk; (C, 1) each."""

    rows: Tensor  # the numbers from 0 on
    ids: Tensor  # the index in the vocabulary; 0 without a target
    ignored: Tensor  # whether there is no target


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target) under a sum of products; forward computes the gradients too.

    The first product is the base's. `columns` has those of each product. `distilled` holds slices
    of the N tokens, each with a weight for its KL divergence from the base's predictions. Gradients
    are computed only where they are needed: a frozen head costs one product and keeps nothing.
    `token_losses_N`, if given, is filled with every token's term of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets_N: Tensor,
        distilled: Sequence[tuple[slice, float]],
        token_losses_N: Tensor | None,
        of_base: OfBase | None,
        columns: Sequence[slice],
        *streams_and_heads: Tensor,
    ) -> Tensor:
        device = targets_N.device
        wanted = ctx.needs_input_grad[5:]
        heads = streams_and_heads[1::2]
        products = [
            _Product(
                stream,
                head.to(product_dtype(head)),
                tokens,
                of_stream=torch.empty_like(stream) if stream_trains else None,
                of_head=torch.zeros_like(head, dtype=torch.float32) if head_trains else None,
            )
            for stream, head, tokens, stream_trains, head_trains in zip(
                streams_and_heads[::2], heads, columns, wanted[::2], wanted[1::2], strict=True
            )
        ]
        loss = torch.zeros((), device=device)
        losses_N = token_losses_N
        if losses_N is None:
            losses_N = torch.empty(len(targets_N), device=device)

        # Allocated once: a chunk's log-probabilities, and its gradient in the precision of the
        # products that read it.
        last = products[-1].head
        num_rows = rows_at_once(device.type, len(last))
        num_held = min(num_rows, len(targets_N))
        log_probs_CV = torch.empty(num_held, len(last), device=device)
        grad_CV = log_probs_CV
        of_one_dtype = all(product.head.dtype == last.dtype for product in products)
        if last.dtype != torch.float32 and of_one_dtype and not distilled:
            grad_CV = torch.empty_like(log_probs_CV, dtype=last.dtype)

        ignored_N1 = (targets_N == IGNORED).unsqueeze(1)
        ids_N1 = targets_N.unsqueeze(1).masked_fill(ignored_N1, 0)
        rows_C1 = torch.arange(num_held, device=device).unsqueeze(1)

        for start in range(0, len(targets_N), num_rows):
            chunk = slice(start, start + num_rows)
            num_here = len(targets_N[chunk])
            of_chunk = [product.at(chunk) for product in products]
            targets = _Targets(rows_C1[:num_here], ids_N1[chunk], ignored_N1[chunk])
            _fill(
                losses_N[chunk],
                grad_CV[:num_here],
                log_probs_CV[:num_here],
                of_chunk,
                targets,
                distilled=list(_within(distilled, chunk)),
                of_base=of_base,
            )
            loss += losses_N[chunk].sum()
            _add_gradients(of_chunk, grad_CV[:num_here], targets.ignored)

        grads: list[Tensor | None] = []
        for product, head in zip(products, heads, strict=True):
            of_head = product.of_head
            grads += [product.of_stream, None if of_head is None else of_head.to(head.dtype)]
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nothing else uses them, and autograd refuses a second backward pass.
        grads = [None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        return None, None, None, None, None, *grads


def _logits_and_bases(
    products: Sequence[_Product], places: Sequence[slice], of_base: OfBase | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the products, and, at `places`, the base's float32 log-probabilities."""
    base, *others = products
    logits_CV = base.stream @ base.head.T
    said = [logits_CV[place].float() for place in places]
    if of_base is not None:
        said = [of_base(logits_SV) for logits_SV in said]
    bases = [logits_SV.log_softmax(dim=1) for logits_SV in said]

    for other in others:
        if other.columns == _EVERY_TOKEN:
            # A frozen bfloat16 head beside a float32 one is never upcast; only its logits are.
            logits_CV = logits_CV.to(other.head.dtype).addmm_(other.stream, other.head.T)
        else:  # tokens that the base lacks
            logits_CV = torch.cat([logits_CV, other.stream @ other.head.T], dim=1)
    return logits_CV, bases


def _fill(
    losses_C: Tensor,
    grad_CV: Tensor,
    log_probs_CV: Tensor,
    products: Sequence[_Product],
    targets: _Targets,
    *,
    distilled: Sequence[tuple[slice, float]],
    of_base: OfBase | None,
) -> None:
    """Compute the losses of a chunk's tokens, and their gradients by the logits.

    Args:
        losses_C: filled with the losses; 0 without a target.
        grad_CV: filled with the gradients; meaningless without a target; may be `log_probs_CV`.
        log_probs_CV: filled with log p, float32.
        products: whose sum is the logits.
        targets: of the chunk.
        distilled: as in `_ChunkedCrossEntropy`, of this chunk.
        of_base: as in `trained_head_cross_entropy`.
    """
    # In the precision of the products; a GPU kernel reads them without a cast.
    logits_CV, bases = _logits_and_bases(products, [place for place, _ in distilled], of_base)
    torch.log_softmax(logits_CV, dim=1, dtype=log_probs_CV.dtype, out=log_probs_CV)
    of_targets_C1 = log_probs_CV.gather(1, targets.ids)
    torch.exp(log_probs_CV, out=grad_CV)
    # `scatter_` copies the whole matrix on a processor.
    grad_CV.index_put_(
        (targets.rows, targets.ids),
        torch.expm1(of_targets_C1, out=grad_CV.new_empty(of_targets_C1.shape)),
    )
    torch.neg(of_targets_C1, out=losses_C.unsqueeze(1)).masked_fill_(targets.ignored, 0.0)
    for (place, weight), base_SV in zip(distilled, bases, strict=True):
        divergence_S, of_divergence_SV = _divergence_and_gradient(
            base_SV, logits_CV[place].float(), targets.ignored[place]
        )
        losses_C[place] += weight * divergence_S
        grad_CV[place].add_(of_divergence_SV, alpha=weight)


def _add_gradients(products: Sequence[_Product], grad_CV: Tensor, ignored_C1: Tensor) -> None:
    """Fill a chunk's gradients of the streams, and add its gradients of the heads."""
    grad = grad_CV
    for stream, head, columns, of_stream, of_head in products:
        if grad.dtype != head.dtype:
            grad = grad_CV.to(head.dtype)
        own = grad[:, columns]
        if of_stream is not None:
            of_stream.copy_((own @ head).masked_fill_(ignored_C1, 0.0))
        if of_head is None:
            continue
        read = stream.masked_fill(ignored_C1, 0.0)
        if of_head.dtype == grad.dtype:
            of_head.addmm_(own.T, read)
        else:
            of_head += own.T @ read


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
    num_old = len(base_head_VD)
    columns = [slice(num_old)]
    streams_and_heads = [x_ND, base_head_VD.detach()]
    if new_head_MD is not None:
        columns.append(slice(num_old, None))
        streams_and_heads += [x_ND, new_head_MD]
    return _ChunkedCrossEntropy.apply(
        targets_BT.flatten(),
        distilled,
        None if token_losses_BT is None else token_losses_BT.view(-1),
        of_base,
        [*columns, _EVERY_TOKEN],
        *streams_and_heads,
        u_BTE.flatten(0, 1),
        head_VE,
    )


def plain_cross_entropy(
    x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, token_losses_BT: Tensor | None = None
) -> Tensor:
    """Return the summed cross-entropy of H x in float32; H gets a gradient if it trains."""
    token_losses_N = None if token_losses_BT is None else token_losses_BT.view(-1)
    return _ChunkedCrossEntropy.apply(
        targets_BT.flatten(),
        (),
        token_losses_N,
        None,
        [_EVERY_TOKEN],
        x_BTD.flatten(0, 1),
        head_VD,
    )
