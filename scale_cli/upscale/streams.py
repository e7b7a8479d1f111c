"""How large the expansion stream is beside the base stream, by whose rms it is divided.

Shapes: B batch, T positions, E expansion channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scale_cli.model.expansion_scale import ExpansionNorm


def expansion_norms(model: nn.Module) -> dict[str, ExpansionNorm]:
    """Return the norms of all expansions by name, each expansion's bottom up; none of a model that is not widened."""
    return {name: norm for name, norm in model.named_modules() if isinstance(norm, ExpansionNorm)}


@contextmanager
def measured_stream_ratios(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the largest rms(u) / rms(x) of any position that each norm meets in the body, by the norm's name.

    Scalars on the model's device, of the forward passes that there are: nothing is computed twice or waited for.
    """
    largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(name: str, _norm: nn.Module, streams: tuple[Tensor, Tensor]) -> None:
        inverse_rms_BT1, u_BTE = streams
        ratio = (u_BTE.float().pow(2).mean(-1).sqrt() * inverse_rms_BT1.squeeze(-1)).max()
        largest[name] = torch.maximum(largest[name], ratio) if name in largest else ratio

    hooks = [norm.register_forward_pre_hook(partial(measure, name)) for name, norm in expansion_norms(model).items()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def layer_ratios(model: Any, by_norm: dict[str, Tensor]) -> Tensor:
    """Return (layers + 1,): what was measured before either norm of each layer of what trains, and before the last."""
    of_layers = [
        torch.maximum(*(by_norm[f"expansion.layers.{index}.{name}_layernorm"] for name in ("input", "post_attention")))
        for index in range(len(model.expansion.layers))
    ]
    return torch.stack([*of_layers, by_norm["expansion.norm"]])
