"""Which layers ADEPT copies: those without which the base loses least on what it knows (arXiv 2510.10071).

The official code sets all of a layer's weights to 0, norms included, which is a bypass: the layer then adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.data.batches import IGNORED, MicroBatch
from scale_cli.upscale.baselines import copied_layers
from scale_cli.upscale.objective import ChunkedLossModel


def with_found_layers(method: MethodConfig, base: PreTrainedModel, probe: Sequence[MicroBatch]) -> MethodConfig:
    """Return an ADEPT's method with the layers that it copies, measured on windows of what the base knows.

    Raises:
        ConfigError: more copies are asked for than the base has layers; or it has a single one (`copied_layers`).
    """
    num_layers = base.config.num_hidden_layers
    num_copies = len(copied_layers(num_layers, method))
    losses = bypass_losses(base, probe)
    found = sorted(range(num_layers), key=lambda layer: (losses[layer], layer))[:num_copies]
    return method.model_copy(update={"adept": method.adept.model_copy(update={"layers": sorted(found)})})


@torch.no_grad()
def bypass_losses(base: Any, probe: Sequence[MicroBatch]) -> list[float]:
    """Return of every layer the loss without it, in nats per token of some windows."""
    layers = range(base.config.num_hidden_layers)
    num_tokens = sum(int((window.targets != IGNORED).sum()) for window in probe)
    losses = []
    for bypassed in layers:
        model = ChunkedLossModel(base, False, [layer for layer in layers if layer != bypassed])
        losses.append(sum(_loss(model, window, base.device, num_tokens) for window in probe))
    return losses


def _loss(model: ChunkedLossModel, window: MicroBatch, device: torch.device, num_tokens: int) -> float:
    here = window.to(device)
    return float(model(here.input_ids, here.targets, num_tokens, here.position_ids).loss)
