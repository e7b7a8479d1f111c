"""All heads from one matrix: the columns of a plain export's lm_head, stream by stream.

    z_0 = H x        z_k = z_0 + H'_k u_k        [H | H'_1 | ...] = lm_head.weight

The plain model computes one product over all columns. Products with each stream's columns give
every head at the same cost. If a head lacks some tokens, `PieceShares` (`model/routing.py`) gives
its logits of all tokens from its z.

Shapes: T rows, D channels, K heads, V the vocabulary, or this device's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..model.routing import PieceShares, mix_shifted, score_shifts

_ROWS_AT_ONCE = 512  # tokens of a prompt whose logits are held at once


@dataclass(frozen=True)
class Shard:
    """The share of the vocabulary that this device has, and the functions that combine all devices'
    tensors.
    """

    start: int  # the first token of the share
    length: int  # number of its tokens; further columns are padding
    gather: Callable[[Tensor], Tensor]  # stacks a tensor of all devices
    sum: Callable[[Tensor], Tensor]  # sums a tensor over all devices


class SharedPieces:
    """`PieceShares` of a head on this device's share of the vocabulary; `vocab_size` counts all
    tokens.
    """

    def __init__(
        self, shares: PieceShares, vocab_size: int, shard: Shard, device: torch.device
    ) -> None:
        self.sources_V, self.added_V = (table.to(device) for table in shares.table(vocab_size))
        lacking_N = (self.sources_V != torch.arange(vocab_size, device=device)).nonzero()[:, 0]
        pieces_P, piece_N = self.sources_V[lacking_N].unique(return_inverse=True)
        self.local_P = (pieces_P - shard.start).clamp(0, shard.length - 1)
        self.is_here_P = pieces_P - shard.start == self.local_P
        here_N = (lacking_N >= shard.start) & (lacking_N < shard.start + shard.length)
        self.lacking_here_N = lacking_N[here_N] - shard.start
        self.piece_here_N = piece_N[here_N]
        self.added_here_V = self.added_V[shard.start : shard.start + shard.length]
        self.shard = shard

    def __call__(self, logits_TV: Tensor) -> Tensor:
        """Return (T, V) logits of all tokens, from the float32 logits of the head's columns."""
        pieces_TP = self.shard.sum(torch.where(self.is_here_P, logits_TV[:, self.local_P], 0.0))
        said_TV = logits_TV.index_copy(-1, self.lacking_here_N, pieces_TP[:, self.piece_here_N])
        said_TV[:, : self.shard.length] += self.added_here_V
        return said_TV


def heads_of(parts: Sequence[Tensor], completed: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Return every head's logits, from the streams' parts of them.

    `completed` has those of the heads that lack tokens, and None for the others.
    """
    base = parts[0].float()
    heads = [base, *(base + part.float() for part in parts[1:])]
    for head, instead in enumerate(completed):
        if instead is not None:
            heads[head] = instead
    return heads


def sizes_of(parts: Sequence[Tensor], completed: Sequence[Tensor | None], length: int) -> Tensor:
    """Return (T, K): the log-sum-exps of the heads' logits over the first `length` tokens."""
    heads = heads_of(parts, completed)
    return torch.stack([torch.logsumexp(of[:, :length], dim=-1) for of in heads], dim=-1)


def scores_of(
    parts: Sequence[Tensor], completed: Sequence[Tensor | None], taken_KT: Tensor, added_KT: Tensor
) -> Tensor:
    """Return (T, V) scores of the heads' mixture, given the results of `score_shifts`."""
    return mix_shifted(heads_of(parts, completed), taken_KT, added_KT)


@dataclass(frozen=True)
class StreamHeads:
    """The heads of a plain export; implements `block_router.Heads`."""

    # by tile (a few thousand tokens) and stream: multiplies the stream's channels with their
    # columns of the head, (T, D_k) to (T, tokens)
    tiles: Sequence[Sequence[Callable[[Tensor], Tensor]]]
    stream_sizes: Sequence[int]  # channels of every stream
    shard: Shard  # of the vocabulary
    # (V, D), the whole head, if its rows can be read one by one: a token's logits are then its row
    # times the hidden row; None if it is quantised
    weight: Tensor | None
    # For every head, maps z to logits of all tokens; None: z covers them.
    shared: Sequence[SharedPieces | None]
    sizes_of: Callable[..., Tensor] = sizes_of  # or a compiled version
    scores_of: Callable[..., Tensor] = scores_of  # likewise

    def mix(self, rows_TD: Tensor, log_weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of this device's share of the vocabulary, and (T, K) log-sum-exps over
        the whole of it.
        """
        parts = self._parts(rows_TD)
        completed = self._completed(parts)
        sizes_TK = self._over_all_devices(self.sizes_of(parts, completed, self.shard.length))
        # Not inside the compiled function, which would compute these numbers of a row again for
        # every token.
        shifts = score_shifts(log_weights_TK.T, sizes_TK.T)
        return self.scores_of(parts, completed, *shifts), sizes_TK

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) logits of `ids_T`, and (T, K) log-sum-exps.

        Few rows and tokens are computed at once; where pieces are shared, all tokens of a row.
        """
        chosen = []
        sizes = []
        for rows, ids in zip(rows_TD.split(_ROWS_AT_ONCE), ids_T.split(_ROWS_AT_ONCE), strict=True):
            tiles = [self._parts(rows)] if any(self.shared) else self._products_of_tiles(rows)
            chosen_of_tiles = []
            sizes_of_tiles = []
            start = 0
            for parts in tiles:
                length = max(0, min(parts[0].shape[-1], self.shard.length - start))  # no padding
                columns = partial(_columns, parts)
                chosen_of_tiles.append(self._chosen(columns, ids, start, length))
                sizes_of_tiles.append(self.sizes_of(parts, self._completed(parts), length))
                start += parts[0].shape[-1]
            chosen.append(torch.stack(chosen_of_tiles).sum(dim=0))
            sizes.append(torch.logsumexp(torch.stack(sizes_of_tiles), dim=0))
        return self.shard.sum(torch.cat(chosen)), self._over_all_devices(torch.cat(sizes))

    def _completed(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Return, for each head, its logits of all tokens if it lacks some; else None."""
        if not any(self.shared):
            return [None] * len(self.shared)
        heads = heads_of(parts)
        return [
            None if shared is None else shared(own)
            for own, shared in zip(heads, self.shared, strict=True)
        ]

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, K) logits of `ids_T`."""
        if self.weight is None:
            parts_of = partial(_columns, self._parts(rows_TD))
        else:
            parts_of = partial(self._products, self.weight, rows_TD)
        return self.shard.sum(self._chosen(parts_of, ids_T, 0, self.shard.length))

    def _products(self, weight_VD: Tensor, rows_TD: Tensor, local_T: Tensor) -> list[Tensor]:
        products_TD = rows_TD.float() * weight_VD[local_T].float()
        # Rounded like the head's own products.
        return [
            part.sum(dim=-1).to(rows_TD.dtype)
            for part in products_TD.split(list(self.stream_sizes), dim=-1)
        ]

    def _parts(self, rows_TD: Tensor) -> list[Tensor]:
        """Return, for every stream, its part (T, V) of the logits."""
        tiles = list(self._products_of_tiles(rows_TD))
        if len(tiles) == 1:
            return tiles[0]
        return [torch.cat(parts, dim=-1) for parts in zip(*tiles, strict=True)]

    def _products_of_tiles(self, rows_TD: Tensor) -> Iterator[list[Tensor]]:
        streams = rows_TD.split(list(self.stream_sizes), dim=-1)
        for products in self.tiles:
            yield [product(stream) for product, stream in zip(products, streams, strict=True)]

    def _chosen(
        self, parts_of: Callable[[Tensor], Sequence[Tensor]], ids_T: Tensor, start: int, length: int
    ) -> Tensor:
        """Return (T, K) logits of `ids_T`; 0 for tokens outside this device's `length` tokens from
        `start` on.

        `parts_of` returns every stream's part (T,) of the tokens' logits, given their indices
        within that range.
        """
        local_T, ours_T = self._local(ids_T, start, length)
        chosen_TK = torch.stack(heads_of(parts_of(local_T)), dim=-1)
        chosen_TK = torch.where(ours_T[:, None], chosen_TK, 0.0)
        for head, shared in enumerate(self.shared):
            if shared is not None:
                local_T, ours_T = self._local(shared.sources_V[ids_T], start, length)
                said_T = heads_of(parts_of(local_T))[head] + shared.added_V[ids_T]
                chosen_TK[:, head] = torch.where(ours_T, said_T, 0.0)
        return chosen_TK

    def _local(self, ids_T: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
        local_T = ids_T.long() - (self.shard.start + start)
        ours_T = (local_T >= 0) & (local_T < length)
        return torch.where(ours_T, local_T, 0), ours_T

    def _over_all_devices(self, sizes_TK: Tensor) -> Tensor:
        return torch.logsumexp(self.shard.gather(sizes_TK), dim=0)


def _columns(parts: Sequence[Tensor], local_T: Tensor) -> list[Tensor]:
    return [part.gather(-1, local_T[:, None])[:, 0] for part in parts]
