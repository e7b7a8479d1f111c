"""All blocks of a linear map as one matrix, stream after stream: [[W, W12], [W21, W22]], which may be widened again.

An expansion reads the streams below it; the block for a stream beside it, which it does not read, is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scale_cli.model.expansion_scale import Expansion, ExpansionLayer, ExpansionLinear
from scale_cli.model.family_scale import OWNERS, Family, family_of
from scale_cli.model.quantised_base import plain_weight
from scale_cli.model.vocabulary_scale import brought_by


@torch.no_grad()
def dense_weight(
    frozen: nn.Linear, added: Sequence[ExpansionLinear], parents: Sequence[int]
) -> Tensor:
    """Return one matrix over all streams, in float32.

    Args:
        frozen: W.
        added: the maps that widen W, each after its parent. W12 goes into the rows of W; without W12, 0 does.
        parents: the stream below each of them: 0 is the base's, k the stream of the k-th.
    """
    widths = [frozen.in_features, *(linear.weight_22.shape[1] for linear in added)]
    streams = [slice(*ends) for ends in pairwise(accumulate(widths, initial=0))]
    weight = plain_weight(frozen)
    rows = [weight.new_zeros(frozen.out_features, sum(widths), dtype=torch.float32)]
    rows[0][:, streams[0]] = weight
    read = [[streams[0]]]
    for own, linear, parent in zip(streams[1:], added, parents, strict=True):
        if linear.weight_12 is not None:
            rows[0][:, own] = linear.weight_12
        of_this = rows[0].new_zeros(len(linear.weight_22), sum(widths))
        below = linear.weight_21.split([one.stop - one.start for one in read[parent]], dim=1)
        for stream, block in zip([*read[parent], own], [*below, linear.weight_22], strict=True):
            of_this[:, stream] = block
        rows.append(of_this)
        read.append([*read[parent], own])
    return torch.cat(rows)


@torch.no_grad()
def dense_embedding(base: Any, expansions: Sequence[Expansion]) -> Tensor:
    """Return (V, channels of all streams) in float32: x_0 and every u_0, for all tokens."""
    frozen = family_of(base.config).token_rows(base)
    of_x = [frozen, *(new.embed_tokens.weight for new in brought_by(expansions))]
    added = [expansion.embed_tokens.weight for expansion in expansions]
    widths = [frozen.shape[1], *(weight.shape[1] for weight in added)]
    whole = frozen.new_empty(sum(map(len, of_x)), sum(widths), dtype=torch.float32)
    columns = whole.split(widths, dim=1)
    for rows, weight in zip(columns[0].split([len(weight) for weight in of_x]), of_x, strict=True):
        rows.copy_(weight)
    for of_expansion, weight in zip(columns[1:], added, strict=True):
        of_expansion.copy_(weight)
    return whole


def widened_linears(
    family: Family, base_layer: Any, layers: Sequence[ExpansionLayer]
) -> Iterator[tuple[str, nn.Linear, list[ExpansionLinear]]]:
    """Yield, for every linear map of one layer: its name, W, and the maps that widen it, bottom up."""
    for name in (
        name for name in OWNERS if hasattr(layers[0], name)
    ):  # a sparse layer has those of attention alone
        yield name, family.linear(base_layer, name), [getattr(layer, name) for layer in layers]
