"""How large the expansion stream is beside the base stream, measured in forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scale_cli.model.expansion_scale import ExpansionNorm


def expansion_norms(model: nn.Module) -> dict[str, ExpansionNorm]:
    """Return the norms of an expansion by name, bottom up; empty if the model is not widened."""
    return {name: norm for name, norm in model.named_modules() if isinstance(norm, ExpansionNorm)}


@contextmanager
def measured_stream_ratios(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that the body's forward passes fill: for each norm, by name, the largest rms(u)
    / rms(x).

    The values are scalars on the model's device, over all positions. No extra pass is run, and
    nothing waits for them.
    """
    largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(name: str, _norm: nn.Module, streams: tuple[Tensor, Tensor]) -> None:
        inverse_rms_BT1, u_BTE = streams
        ratio = (u_BTE.float().pow(2).mean(-1).sqrt() * inverse_rms_BT1.squeeze(-1)).max()
        largest[name] = torch.maximum(largest[name], ratio) if name in largest else ratio

    hooks = [
        norm.register_forward_pre_hook(partial(measure, name))
        for name, norm in expansion_norms(model).items()
    ]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def layer_ratios(model: Any, by_norm: dict[str, Tensor]) -> Tensor:
    """Return (layers + 1,): the largest ratio at any norm of each trained layer, then the ratio at
    the last norm.
    """
    of_layers = [
        torch.stack(
            [by_norm[f"expansion.layers.{index}.{name}"] for name in expansion_norms(layer)]
        ).amax()
        for index, layer in enumerate(model.expansion.layers)
    ]
    return torch.stack([*of_layers, by_norm["expansion.norm"]])
