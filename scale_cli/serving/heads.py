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
    """

    products: Sequence[Callable[[Tensor], Tensor]]
    stream_sizes: Sequence[int]
    parents: Sequence[int]
    shard: Shard
    weight: Tensor | None

    def logits(self, rows_TD: Tensor) -> list[Tensor]:
        """Return every head's logits, float32, of this device's share of the vocabulary."""
        streams = rows_TD.split(list(self.stream_sizes), dim=-1)
        return self._added_up([product(stream).float() for product, stream in zip(self.products, streams, strict=True)])

    def sizes(self, logits: Sequence[Tensor]) -> Tensor:
        """Return (T, K): the log-sum-exps of the heads' logits over the whole vocabulary."""
        return self._over_all_devices(self._local_sizes(logits))

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) logits of `ids_T`, and (T, K) log-sum-exps; the logits of few rows are held at once."""
        chosen, sizes = [], []
        for rows, ids in zip(rows_TD.split(_ROWS_AT_ONCE), ids_T.split(_ROWS_AT_ONCE), strict=True):
            logits = self.logits(rows)
            chosen.append(self._chosen(logits, ids))
            sizes.append(self._local_sizes(logits))
        return self.shard.sum(torch.cat(chosen)), self._over_all_devices(torch.cat(sizes))

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, K) logits of `ids_T`."""
        if self.weight is None:
            return self.shard.sum(self._chosen(self.logits(rows_TD), ids_T))
        local_T, ours_T = self._local(ids_T)
        products_TD = rows_TD.float() * self.weight[local_T].float()
        parts = [part.sum(dim=-1) for part in products_TD.split(list(self.stream_sizes), dim=-1)]
        # Rounded as the head's own products are.
        logits_TK = torch.stack(self._added_up([part.to(rows_TD.dtype).float() for part in parts]), dim=-1)
        return self.shard.sum(torch.where(ours_T[:, None], logits_TK, 0.0))

    def _added_up(self, parts: list[Tensor]) -> list[Tensor]:
        heads = parts[:1]
        for parent, part in zip(self.parents, parts[1:], strict=True):
            heads.append(heads[parent] + part)
        return heads

    def _chosen(self, logits: Sequence[Tensor], ids_T: Tensor) -> Tensor:
        local_T, ours_T = self._local(ids_T)
        chosen_TK = torch.cat([logits_TV.gather(-1, local_T[:, None]) for logits_TV in logits], dim=-1)
        return torch.where(ours_T[:, None], chosen_TK, 0.0)

    def _local(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        local_T = ids_T.long() - self.shard.start
        ours_T = (local_T >= 0) & (local_T < self.shard.length)
        return torch.where(ours_T, local_T, 0), ours_T

    def _local_sizes(self, logits: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.logsumexp(of[:, : self.shard.length], dim=-1) for of in logits], dim=-1)

    def _over_all_devices(self, sizes_TK: Tensor) -> Tensor:
        return torch.logsumexp(self.shard.gather(sizes_TK), dim=0)
