"""The difference stream: u = P dx, where dx is what training changes in x."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scale_cli.methods.starts.copies import (
    copy_layer,
    gains_of,
    map_at_once,
    numbers,
    one_thread,
    rms,
)
from scale_cli.methods.starts.knowledge import knows
from scale_cli.methods.starts.start import Start, TextToLearn
from scale_cli.model.family_scale import SUBLAYERS, family_of

# Most tokens whose rows of the head decide the directions: the most frequent ones.
_NUM_TOKENS = 4096
# Of the randomised SVD: extra dimensions of the random subspace, power iterations.
_OVERSAMPLED = 16
_PASSES = 4
_ROWS_AT_ONCE = 4096
_MATRIX_RATES = {"muon": 1.5, "adamw": 0.3}


class DifferenceStream(Start):
    """For text that the base knows.

    Copies read x + P^T u, the gate's x alone. They write P times what they compute, less what the
    originals compute. H' reads u as H reads P^T u.
    """

    name = "difference-stream"
    first_update_tells = True

    def suits(self, base: PreTrainedModel, text: TextToLearn | None) -> bool:
        return text is None or knows(base, text)

    def fill(self, model: Any, seed: int, text: TextToLearn | None) -> dict[str, float]:
        base = model.base
        expansion = model.expansion
        with one_thread():
            start_layer = partial(_start_layer, base.config, _start_head(model, text))
            map_at_once(start_layer, base.model.layers, expansion.layers)
        return {}

    def rates(self, began: Mapping[str, Any], optimiser: str) -> Mapping[str, float]:
        return {"embedding": 4.0, "head": 1.0, "gains": 1.0, "matrix": _MATRIX_RATES[optimiser]}


def _start_head(model: Any, text: TextToLearn | None) -> Tensor:
    """Fill H' and the gains of its norm; return P, (count, D)."""
    base = model.base
    expansion = model.expansion
    head_VD = base.lm_head.weight.detach().cpu()
    if expansion.new_tokens is not None:
        head_VD = torch.cat([head_VD, expansion.new_tokens.lm_head.weight.detach().cpu()])
    gains = gains_of(base.config, base.model, "norm")
    count = min(base.config.hidden_size, model.config.expansion_hidden_size)
    directions = _head_directions(head_VD, gains, text, count)
    sizes = _sizes_along(directions, gains)

    def write(first: int) -> None:
        rows = slice(first, first + _ROWS_AT_ONCE)
        expansion.lm_head.weight[rows, :count].copy_(
            (head_VD[rows].double() * gains) @ directions.T / sizes
        )

    map_at_once(write, range(0, len(head_VD), _ROWS_AT_ONCE))
    _fill_gains(expansion.norm, sizes)
    return directions


def _sizes_along(directions: Tensor, gains: Tensor) -> Tensor:
    """Return g', (count,): the lengths of the rows of P diag(g); without a norm, ones.

    By them an update of W21 or W22 moves u as far as one of that size of W moves P x. A few of
    Gemma 3's gains are a hundred times the others, along which no token of the text differs.
    """
    return (directions * gains).norm(dim=1)


def _fill_gains(norm: Any, sizes: Tensor) -> None:
    """Give a norm its gains g'; channels beyond the directions have them on average."""
    norm.weight.fill_(rms(sizes))
    norm.weight[: len(sizes)].copy_(sizes)


def _head_directions(
    head_VD: Tensor, gains: Tensor, text: TextToLearn | None, count: int
) -> Tensor:
    """Return (count, D) orthonormal directions in which the rows of H diag(g) differ most, weighted
    by frequency.

    The mean row does not count: what all logits share, no probability shows.
    """
    shares = torch.ones(len(head_VD)) if text is None else text.token_shares
    most = min(_NUM_TOKENS, len(head_VD))
    shares, chosen = shares.double().sort(descending=True, stable=True)
    shares = shares[:most]
    rows = head_VD[chosen[:most]].double() * gains
    shares = (shares / shares.sum())[:, None]
    return leading_directions((rows - (shares * rows).sum(dim=0)) * shares.sqrt(), count)


def _start_layer(config: Any, directions: Tensor, base_layer: Any, layer: Any) -> None:
    """Fill one layer's maps, and the gains of its norms; `directions` are the rows of P."""
    family = family_of(config)
    count = len(directions)
    places = copy_layer(config, base_layer, layer)

    for sublayer in SUBLAYERS:
        before, after = family.norms_around(sublayer)
        gains = gains_of(config, base_layer, before)
        sizes = _sizes_along(directions, gains)
        if before is not None:
            _fill_gains(getattr(layer, before), sizes)
        for name in sublayer.reading:
            if name in sublayer.reading_x_alone:
                continue
            rows = numbers(base_layer, name)[places.of(name)]
            getattr(layer, name).weight_22[:, :count].copy_((rows * gains) @ directions.T / sizes)

        added = getattr(layer, sublayer.writing)
        columns = places.of(sublayer.writing)
        gains = gains_of(config, base_layer, after)
        sizes = _sizes_along(directions, gains)
        if after is not None:
            _fill_gains(getattr(layer, after), sizes)
        numbers_written = numbers(base_layer, sublayer.writing)[:, columns]
        written = (directions * gains / sizes[:, None]) @ numbers_written
        added.weight_22[:count].copy_(written)
        subtracted = torch.zeros(count, added.weight_21.shape[1]).double()
        subtracted.index_add_(1, columns, -written)
        added.weight_21[:count].copy_(subtracted)


def leading_directions(weight: Tensor, count: int) -> Tensor:
    """Return `count` leading right singular directions of a float64 matrix (rows, D): orthonormal
    rows, largest first.

    They are found in a random subspace, whose draw is fixed; the largest entry of each is positive.

    Source: Halko, Martinsson & Tropp 2011, "Finding structure with randomness".
    """
    num_drawn = min(count + _OVERSAMPLED, weight.shape[1])
    drawn = torch.randn(
        weight.shape[1],
        num_drawn,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    basis, _ = torch.linalg.qr(drawn)
    for _ in range(_PASSES if num_drawn < weight.shape[1] else 0):
        basis, _ = torch.linalg.qr(weight.T @ (weight @ basis))
    projected = weight @ basis
    _, vectors = torch.linalg.eigh(projected.T @ projected)
    found = (basis @ vectors[:, -count:].flip(1)).T
    largest = found.gather(1, found.abs().argmax(dim=1, keepdim=True))
    return found * torch.where(largest < 0, -1.0, 1.0)
