"""Tokens that the base lacks: their rows in x and in the vocabulary head, and the base's
probability of them.

    x_0    = E[t], or E_new[t]: the mean of the rows of its old pieces, frozen, so that x needs no gradient
    logits = [H x ; H_new x] + H' u: H_new x is a product of its own, so that H x keeps its bits

The base gives a new token no probability, so the router would drop the base for good after the
first one. Under routing, `PieceShares` (`routing.py`) therefore gives each new token a share of its
first piece's probability.

Shapes: B batch, T positions, D base channels, V old tokens, N new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .family_scale import family_of
from .routing import PieceShares


class NewTokens(nn.Module):
    """The rows of new tokens in x, which are composed here, and in the vocabulary head.

    `new_tokens` and `own_pieces` are as in `ScaleConfig`.
    """

    def __init__(self, base: Any, new_tokens: Sequence[str], own_pieces: Sequence[int]) -> None:
        super().__init__()
        pieces = pieces_of(new_tokens)
        self.first_id, num_channels = base.model.embed_tokens.weight.shape
        self.shared = PieceShares([old[0] for old in pieces], own_pieces)
        self.embed_tokens = nn.Embedding(len(pieces), num_channels).requires_grad_(False)
        self.lm_head = nn.Linear(num_channels, len(pieces), bias=False)
        rows_VD = family_of(base.config).token_rows(base)
        if not rows_VD.is_meta:
            self.embed_tokens.weight.copy_(composed(rows_VD, pieces))


def pieces_of(new_tokens: Iterable[str]) -> list[list[int]]:
    """Return, for each new token as `ScaleConfig` stores it, the old ids that stand for it."""
    return [[int(index) for index in token.split()] for token in new_tokens]


def composed(rows_VD: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Return (N, D) float64 rows of new tokens: the mean of their pieces' rows, scaled to the
    pieces' median length.
    """
    rows_VD = rows_VD.detach().cpu().double()  # the same sums on every device
    lengths = torch.tensor([len(old) for old in pieces])
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    flat = torch.tensor([index for old in pieces for index in old])
    sums_ND = torch.zeros(len(lengths), rows_VD.shape[1], dtype=torch.float64).index_add_(
        0, owners, rows_VD[flat]
    )
    return F.normalize(sums_ND, dim=1) * rows_VD[flat.unique()].norm(dim=1).median()


def embed(embedding: nn.Embedding, new: NewTokens | None, input_ids: Tensor) -> Tensor:
    """Return x_0 (B, T, D) of old and new tokens."""
    if new is None:
        return cast(Tensor, embedding(input_ids))
    x_BTD = embedding(input_ids.clamp(max=new.first_id - 1))
    new_BTD = new.embed_tokens((input_ids - new.first_id).clamp(min=0)).to(x_BTD.dtype)
    return torch.where((input_ids < new.first_id).unsqueeze(-1), x_BTD, new_BTD)
