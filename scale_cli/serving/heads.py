"""Both heads out of one matrix: the columns of a plain export's lm_head, stream by stream.

    z_0 = H x        z_k = z_parent(k) + H'_k u_k        [H | H'_1 | ...] = lm_head.weight

One product over all columns is what the plain model computes. Kept apart, the columns of each stream give every head at
that price.

Shapes: T rows, D channels, K heads, V the vocabulary, or this device's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.routing import mix_logits

_ROWS_AT_ONCE = 512  # whose logits are held together, of a prompt's tokens


@dataclass(frozen=True)
class Shard:
    """The share of the vocabulary that this device has, and what brings the shares together.

    Attributes:
        start: the first token of the share.
        length: how many it has; more columns than these are padding.
        gather: of a tensor, those of all devices, stacked.
        sum: of a tensor, the sum over all devices.
    """

    start: int
    length: int
    gather: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


def sizes_of(parts: Sequence[Tensor], parents: Sequence[int], length: int) -> Tensor:
    """Return (T, K): the log-sum-exps of the heads' logits over the first `length` tokens."""
    return torch.stack([torch.logsumexp(of[:, :length], dim=-1) for of in _added_up(parts, parents)], dim=-1)


def scores_of(parts: Sequence[Tensor], parents: Sequence[int], log_weights_TK: Tensor, sizes_TK: Tensor) -> Tensor:
    """Return (T, V): the scores of the heads' mixture."""
    return mix_logits(log_weights_TK.T, _added_up(parts, parents), sizes_TK.T)


def _added_up(parts: Sequence[Tensor], parents: Sequence[int]) -> list[Tensor]:
    heads = [parts[0].float()]
    for parent, part in zip(parents, parts[1:], strict=True):
        heads.append(heads[parent] + part.float())
    return heads


@dataclass(frozen=True)
class StreamHeads:
    """The heads of a plain export, which is what `block_router.Heads` asks for.

    Attributes:
        products: of every stream, what multiplies its channels with its columns of the head: (T, D_k) to (T, V).
        stream_sizes: channels of every stream.
        parents: of every added stream the head to whose logits its own are added.
        shard: of the vocabulary.
        weight: (V, D), all columns, where they can be read one by one: a token's logits are then its row times the
            hidden row. None where they are quantised.
        sizes_of: the function of that name, or a compiled one.
        scores_of: likewise.
    """

    products: Sequence[Callable[[Tensor], Tensor]]
    stream_sizes: Sequence[int]
    parents: Sequence[int]
    shard: Shard
    weight: Tensor | None
    sizes_of: Callable[..., Tensor] = sizes_of
    scores_of: Callable[..., Tensor] = scores_of

    def mix(self, rows_TD: Tensor, log_weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of this device's share of the vocabulary, and (T, K) the heads' log-sum-exps over all."""
        parts = self._parts(rows_TD)
        sizes_TK = self._over_all_devices(self.sizes_of(parts, self.parents, self.shard.length))
        return self.scores_of(parts, self.parents, log_weights_TK, sizes_TK), sizes_TK

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) logits of `ids_T`, and (T, K) log-sum-exps; the logits of few rows are held at once."""
        chosen, sizes = [], []
        for rows, ids in zip(rows_TD.split(_ROWS_AT_ONCE), ids_T.split(_ROWS_AT_ONCE), strict=True):
            parts = self._parts(rows)
            chosen.append(self._chosen(parts, ids))
            sizes.append(self.sizes_of(parts, self.parents, self.shard.length))
        return self.shard.sum(torch.cat(chosen)), self._over_all_devices(torch.cat(sizes))

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, K) logits of `ids_T`."""
        if self.weight is None:
            return self.shard.sum(self._chosen(self._parts(rows_TD), ids_T))
        local_T, ours_T = self._local(ids_T)
        products_TD = rows_TD.float() * self.weight[local_T].float()
        parts = [part.sum(dim=-1) for part in products_TD.split(list(self.stream_sizes), dim=-1)]
        # Rounded as the head's own products are.
        logits_TK = torch.stack(_added_up([part.to(rows_TD.dtype) for part in parts], self.parents), dim=-1)
        return self.shard.sum(torch.where(ours_T[:, None], logits_TK, 0.0))

    def _parts(self, rows_TD: Tensor) -> list[Tensor]:
        streams = rows_TD.split(list(self.stream_sizes), dim=-1)
        return [product(stream) for product, stream in zip(self.products, streams, strict=True)]

    def _chosen(self, parts: Sequence[Tensor], ids_T: Tensor) -> Tensor:
        local_T, ours_T = self._local(ids_T)
        chosen = _added_up([part.gather(-1, local_T[:, None]) for part in parts], self.parents)
        return torch.where(ours_T[:, None], torch.cat(chosen, dim=-1), 0.0)

    def _local(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        local_T = ids_T.long() - self.shard.start
        ours_T = (local_T >= 0) & (local_T < self.shard.length)
        return torch.where(ours_T, local_T, 0), ours_T

    def _over_all_devices(self, sizes_TK: Tensor) -> Tensor:
        return torch.logsumexp(self.shard.gather(sizes_TK), dim=0)
