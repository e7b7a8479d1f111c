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
    """Return an ADEPT's method with the layers that it copies, measured on windows of what the base knows."""
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
    here = [window.to(base.device) for window in probe]
    losses = []
    for bypassed in layers:
        model = ChunkedLossModel(base, False, [layer for layer in layers if layer != bypassed])
        each = (model(window.input_ids, window.targets, num_tokens, window.position_ids).loss for window in here)
        losses.append(sum(map(float, each)))
    return losses
