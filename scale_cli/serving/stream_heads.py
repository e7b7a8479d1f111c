"""Both heads from two products, one for each stream of the last hidden row.

A plain export of an expansion holds [x | u] and one matrix, whose columns are the streams':

    z_base = H x        z_trained = z_base + H' u        [H | H'] = lm_head.weight

The plain model computes one product over all columns. A product with each stream's columns gives
both heads at the same cost. An adapter's rows are [x | y], a last row of each model:

    z_base = H x        z_trained = H y

If the base lacks new tokens, `PieceShares` (`model/routing.py`) gives its logits of all tokens from
z_base; the trained head has them.

Shapes: T rows, D channels, V the vocabulary, or this device's share of it; 2: the heads, or the two
products that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.routing import PieceShares, mix_shifted, score_shifts

_ROWS_AT_ONCE = 512  # tokens of a prompt whose logits are held at once
# Of rows (T, D): the two products of some tokens, (T, tokens) each.
Products = Callable[[Tensor], tuple[Tensor, Tensor]]
# Of both products: the trained head's float32 logits.
TrainedOf = Callable[[Tensor, Tensor], Tensor]


class HeadProducts(NamedTuple):
    """What rows are multiplied by, and how both heads come of it."""

    modules: nn.ModuleList  # hold the weights that a product reads
    tiles: Sequence[Products]  # by tile: a few thousand tokens
    # (V, D) of each stream, if their rows can be read one by one: a product is then a row of one
    # times the hidden row; None if the head is quantised
    weights: Sequence[Tensor] | None
    trained_of: TrainedOf


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
    """`PieceShares` of the base on this device's share of the vocabulary; `vocab_size` counts all
    tokens.
    """

    def __init__(
        self, shares: PieceShares, vocab_size: int, shard: Shard, device: torch.device
    ) -> None:
        num_old = vocab_size - len(shares.first)
        self.sources_V, self.added_V = (of.to(device) for of in shares.table(num_old))
        lacking_N = torch.arange(num_old, vocab_size, device=device)
        pieces_P, piece_N = self.sources_V[num_old:].unique(return_inverse=True)
        self.local_P = (pieces_P - shard.start).clamp(0, shard.length - 1)
        self.is_here_P = pieces_P - shard.start == self.local_P
        here_N = (lacking_N >= shard.start) & (lacking_N < shard.start + shard.length)
        self.lacking_here_N = lacking_N[here_N] - shard.start
        self.piece_here_N = piece_N[here_N]
        self.added_here_V = self.added_V[shard.start : shard.start + shard.length]
        self.shard = shard

    def __call__(self, logits_TV: Tensor) -> Tensor:
        """Return (T, V) float32 logits of all tokens, from those of the head's columns."""
        logits_TV = logits_TV.float()
        pieces_TP = self.shard.sum(torch.where(self.is_here_P, logits_TV[:, self.local_P], 0.0))
        said_TV = logits_TV.index_copy(-1, self.lacking_here_N, pieces_TP[:, self.piece_here_N])
        said_TV[:, : self.shard.length] += self.added_here_V
        return said_TV


def trained_by_sum(z_TV: Tensor, added_TV: Tensor) -> Tensor:
    """Return the trained head's logits where it adds to the base's."""
    return z_TV.float() + added_TV.float()


def trained_alone(_: Tensor, own_TV: Tensor) -> Tensor:
    """Return the trained head's logits where they are a product of its own."""
    return own_TV.float()


def sizes_of(
    base_TV: Tensor, products: tuple[Tensor, Tensor], trained_of: TrainedOf, length: int
) -> Tensor:
    """Return (T, 2): the log-sum-exps of both heads' logits, over the first `length` tokens."""
    heads = (base_TV.float(), trained_of(*products))
    return torch.stack([torch.logsumexp(of[:, :length], dim=-1) for of in heads], dim=-1)


def scores_of(
    base_TV: Tensor,
    products: tuple[Tensor, Tensor],
    trained_of: TrainedOf,
    taken_2T: Tensor,
    more_2T: Tensor,
) -> Tensor:
    """Return (T, V) scores of the heads' mixture, given the results of `score_shifts`."""
    return mix_shifted([base_TV.float(), trained_of(*products)], taken_2T, more_2T)


@dataclass(frozen=True)
class StreamHeads:
    """The two heads of a routed model; implements `block_router.Heads`."""

    products: HeadProducts
    stream_sizes: Sequence[int]  # channels of each stream in a row
    shard: Shard  # of the vocabulary
    shared: SharedPieces | None = None  # None: the base has all tokens
    sizes_of: Callable[..., Tensor] = sizes_of  # or a compiled version
    scores_of: Callable[..., Tensor] = scores_of  # likewise

    def mix(self, rows_TD: Tensor, log_odds_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of this device's share of the vocabulary, and (T, 2) log-sum-exps over
        the whole of it.
        """
        whole = self._whole_products(rows_TD)
        base_TV = self._base_of(whole)
        trained_of = self.products.trained_of
        own_sizes_T2 = self.sizes_of(base_TV, whole, trained_of, self.shard.length)
        sizes_T2 = torch.logsumexp(self.shard.gather(own_sizes_T2), dim=0)
        log_weights_2T = F.logsigmoid(torch.stack([-log_odds_T, log_odds_T]))
        # Not inside the compiled function, which would compute these numbers of a row again for
        # every token.
        shifts = score_shifts(log_weights_2T, sizes_T2.T)
        return self.scores_of(base_TV, whole, trained_of, *shifts), sizes_T2

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, 2) logits of `ids_T`, and (T, 2) log-sum-exps.

        Few rows and tokens are computed at once; where pieces are shared, all tokens of a row.
        """
        logits = []
        sizes = []
        for rows, ids in zip(rows_TD.split(_ROWS_AT_ONCE), ids_T.split(_ROWS_AT_ONCE), strict=True):
            whole = None
            tiles: Iterable[tuple[Tensor, Tensor]] = (tile(rows) for tile in self.products.tiles)
            if self.products.weights is None or self.shared is not None:
                whole = self._whole_products(rows)
                tiles = [whole]
            logits.append(self._logits_here(rows, ids, whole))

            sizes_of_tiles = []
            left = self.shard.length  # without padding
            for tile in tiles:
                base_TV = self._base_of(tile)
                trained_of = self.products.trained_of
                sizes_of_tiles.append(self.sizes_of(base_TV, tile, trained_of, max(0, left)))
                left -= base_TV.shape[-1]
            sizes.append(torch.logsumexp(torch.stack(sizes_of_tiles), dim=0))
        sizes_T2 = torch.logsumexp(self.shard.gather(torch.cat(sizes)), dim=0)
        return self.shard.sum(torch.cat(logits)), sizes_T2

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, 2) logits of `ids_T`."""
        whole = self._whole_products(rows_TD) if self.products.weights is None else None
        return self.shard.sum(self._logits_here(rows_TD, ids_T, whole))

    def _logits_here(
        self, rows_TD: Tensor, ids_T: Tensor, whole: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return (T, 2) logits of `ids_T`; 0 for tokens of other devices.

        `whole` has the products of the rows with all tokens, if they are known.
        """
        (z_T, other_T), is_here_T = self._products_here(rows_TD, ids_T, whole)
        trained_T = torch.where(is_here_T, self.products.trained_of(z_T, other_T), 0.0)
        if self.shared is not None:
            pieces_T = self.shared.sources_V[ids_T]
            (z_T, _), is_here_T = self._products_here(rows_TD, pieces_T, whole)
            z_T = z_T + self.shared.added_V[ids_T]
        return torch.stack([torch.where(is_here_T, z_T, 0.0), trained_T], dim=-1)

    def _products_here(
        self, rows_TD: Tensor, ids_T: Tensor, whole: tuple[Tensor, Tensor] | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return both products (T,) of `ids_T`, and whether this device has the token."""
        local_T = ids_T.long() - self.shard.start
        is_here_T = (local_T >= 0) & (local_T < self.shard.length)
        local_T = torch.where(is_here_T, local_T, 0)
        if whole is not None:
            return [of.gather(-1, local_T[:, None])[:, 0].float() for of in whole], is_here_T
        assert self.products.weights is not None, "only its rows are read one by one"
        streams = rows_TD.float().split(list(self.stream_sizes), dim=-1)
        found = [
            (stream_TD * weight[local_T].float()).sum(dim=-1)
            for stream_TD, weight in zip(streams, self.products.weights, strict=True)
        ]
        # Rounded like the head's own products.
        return [of.to(rows_TD.dtype).float() for of in found], is_here_T

    def _base_of(self, products: tuple[Tensor, Tensor]) -> Tensor:
        return products[0] if self.shared is None else self.shared(products[0])

    def _whole_products(self, rows_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return both products with all tokens, (T, V) each."""
        found = [tile(rows_TD) for tile in self.products.tiles]
        if len(found) == 1:
            return found[0]
        z_tiles, other_tiles = zip(*found, strict=True)
        return torch.cat(z_tiles, dim=-1), torch.cat(other_tiles, dim=-1)
