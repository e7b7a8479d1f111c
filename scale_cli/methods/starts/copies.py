"""Copies of a base's heads and MLP channels, which every start begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_cli.model.family_scale import SUBLAYERS, family_of, linear_of

# Share of the MLP channels that are too large to copy.
_SHARE_OF_HUGE = 0.05
# Layers, or pieces of the head, that are started at once: each holds its largest maps in float64.
_THREADS = 4


@dataclass(frozen=True)
class CopiedPlaces:
    """Where in a base layer's maps the copies are from."""

    queries: Tensor  # channels of the copied query heads
    keys: Tensor  # and of the key/value heads that these share
    channels: Tensor  # of the MLP

    def of(self, name: str) -> Tensor:
        """Return the copied rows of a map that reads, or columns of one that writes."""
        if name in ("q_proj", "o_proj"):
            return self.queries
        return self.keys if name in ("k_proj", "v_proj") else self.channels


def map_at_once(function: Callable[..., object], *items: Any) -> list[Any]:
    """Return a function's results, computed by a few threads without gradients."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(torch.no_grad()(function), *items))


def copy_layer(config: Any, base_layer: Any, layer: Any) -> CopiedPlaces:
    """Let added heads and channels read x as those of the base do that have the largest weights.

    Biases and the gains of norms over queries and keys are copied too. The gains of a norm over the
    layer's output get the size of the base's.
    """
    family = family_of(config)
    queries, keys = _copied_heads(base_layer, len(layer.k_proj.weight_21))
    channels = _copied_channels(base_layer, len(layer.gate_proj.weight_21))
    places = CopiedPlaces(queries, keys, channels)

    for sublayer in SUBLAYERS:
        for name in sublayer.reading:
            added = getattr(layer, name)
            rows = places.of(name)
            added.weight_21.copy_(numbers(base_layer, name)[rows])
            if added.bias_2 is not None:
                added.bias_2.copy_(linear_of(base_layer, name).bias.cpu()[rows])
        _, after = family.norms_around(sublayer)
        if after is not None:
            getattr(layer, after).weight.fill_(rms(gains_of(config, base_layer, after)))

    for width_norm, copied in zip(family.width_norms, (queries, keys), strict=True):
        if width_norm is not None:
            gains = gains_of(config, base_layer.self_attn, width_norm)
            getattr(layer, width_norm).weight.copy_(gains[copied])
    return places


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread, because the number of threads decides how sums are split and so
    rounded.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rms(values: Tensor) -> float:
    """Return the root of the mean square."""
    return values.square().mean().sqrt().item()


def gains_of(config: Any, owner: Any, norm: str | None) -> Tensor:
    """Return the gains of a module's norm, in float64 on the CPU; without a norm, one 1."""
    if norm is None:
        return torch.ones(1, dtype=torch.float64)
    weight = getattr(owner, norm).weight.detach()
    return family_of(config).norm_form.gains(weight).double().cpu()


def numbers(base_layer: Any, name: str) -> Tensor:
    """Return a map's W in float64 on the CPU; of a quantised one, the numbers that it stands for."""
    return linear_of(base_layer, name).weight.detach().dequantize().double().cpu()


def _copied_heads(base_layer: Any, num_added: int) -> tuple[Tensor, Tensor]:
    """Return the channels of the copied query heads and of the copied key/value heads.

    A key/value head is copied with the query heads that share it: first those whose maps v and o
    are largest. `num_added` counts channels of keys.
    """
    head_dim = base_layer.self_attn.head_dim
    values = numbers(base_layer, "v_proj").unflatten(0, (-1, head_dim))
    outputs = numbers(base_layer, "o_proj").unflatten(1, (len(values), -1))
    sizes = values.square().sum(dim=(1, 2)) * outputs.square().sum(dim=(0, 2))
    heads = _largest(sizes, num_added // head_dim)[:, None]
    of_one = outputs.shape[2]  # channels of the queries that share a head
    return (
        (heads * of_one + torch.arange(of_one)).flatten(),
        (heads * head_dim + torch.arange(head_dim)).flatten(),
    )


def _copied_channels(base_layer: Any, count: int) -> Tensor:
    """Return the MLP channels to copy: those whose gate, up and down are largest, but for the very
    largest.

    Those make the huge values of a first token's stream. Copies of them would feed a change of that
    token's stream back to itself, layer after layer.
    """
    gate, up, down = (numbers(base_layer, name) for name in ("gate_proj", "up_proj", "down_proj"))
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    left_out = min(round(_SHARE_OF_HUGE * len(sizes)), max(0, len(sizes) - count))
    return _largest(sizes, count + left_out, left_out)


def _largest(sizes: Tensor, count: int, left_out: int = 0) -> Tensor:
    """Return the places of the largest sizes up to `count`, without the very largest."""
    assert count <= len(sizes), "two copies of one would stay the same"
    return sizes.argsort(descending=True, stable=True)[left_out:count].sort().values
