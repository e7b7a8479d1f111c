"""All blocks of a linear map as one matrix, stage after stage: [[W, W12], [W21, W22]], and that widened again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_cli.model.expansion_scale import Expansion, ExpansionLayer, ExpansionLinear


@torch.no_grad()
def dense_weight(frozen: nn.Linear, added: Sequence[ExpansionLinear]) -> Tensor:
    """Return one matrix over all streams, in float32.

    Args:
        frozen: W.
        added: what widens it, bottom up; a W12 writes into the rows of W, and is 0 where it does not exist.
    """
    weight = frozen.weight.detach().float()
    for linear in added:
        right = torch.zeros(len(weight), linear.weight_22.shape[1], device=weight.device)
        if linear.weight_12 is not None:
            right[: frozen.out_features] = linear.weight_12
        below = torch.cat([linear.weight_21, linear.weight_22], dim=1).float()
        weight = torch.cat([torch.cat([weight, right], dim=1), below])
    return weight


@torch.no_grad()
def dense_embedding(base: Any, expansions: Sequence[Expansion]) -> Tensor:
    """Return (V, channels of all streams) in float32: the token embedding of a base and of what widens it."""
    frozen = base.model.embed_tokens.weight.detach().float()
    if expansions and (new := expansions[-1].new_tokens) is not None:
        frozen = torch.cat([frozen, new.embed_tokens.weight.float()])
    return torch.cat([frozen, *(expansion.embed_tokens.weight.float() for expansion in expansions)], dim=1)


def widened_linears(
    base_layer: Any, layers: Sequence[ExpansionLayer]
) -> Iterator[tuple[str, str, nn.Linear, list[ExpansionLinear]]]:
    """Yield owner, name, W and what widens it, bottom up, of every linear map of one layer.

    Args:
        base_layer: the base's.
        layers: the expansions' of the same index, bottom up; at least one.
    """
    for name, child in layers[0].named_children():
        if isinstance(child, ExpansionLinear):
            owner = "self_attn" if hasattr(base_layer.self_attn, name) else "mlp"
            yield owner, name, getattr(getattr(base_layer, owner), name), [getattr(layer, name) for layer in layers]
