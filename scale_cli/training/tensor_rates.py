"""ADEPT's learning rates: every few steps each tensor gets one by what it matters to what the base knows.

importance I = mean |theta| |g|, g over some windows of known text, |.| of each window's before they are averaged; the
rate is `train.lr` times 2 (max I - I) / (max I - min I), over all tensors that train. This is the official code
(arXiv 2510.10071); the paper has 2 (1 - I), of groups of neurons. Until the first measurement, and where all tensors
matter the same, the rate is `train.lr`. Ours: a window counts alone, not two, so that rates do not depend on how
a batch is cut up. They are part of the run's position, so a resume goes on with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import IGNORED, Batches, MicroBatch, known_windows
from scale_cli.training.optimiser import TENSOR_RATE
from scale_cli.training.step import loss_share


@dataclass(frozen=True)
class TensorRates:
    """What measures the rates: of every group of an optimiser, which has one tensor each."""

    model: nn.Module  # as it is trained, by one process
    probe: list[MicroBatch]  # windows of what the base knows
    every_steps: int
    mixed_precision: str

    @classmethod
    def of(cls, config: RunConfig, model: nn.Module, batches: Batches) -> TensorRates | None:
        """Return what measures them; None where the method has none."""
        if config.method.variant != "adept":
            return None
        roles = [source.role for source in config.corpus.sources]
        known = [windows for windows, role in zip(batches.sources, roles, strict=True) if role == "replay"]
        adept = config.method.adept
        probe = known_windows(known, config.seed, adept.probe_windows)
        return cls(model, probe, adept.every_steps, config.train.mixed_precision)

    def are_due(self, step: int) -> bool:
        """Return whether they are measured before a step (0 is the first)."""
        return step > 0 and step % self.every_steps == 0

    def measured(self, accelerator: Accelerator, optimiser: torch.optim.Optimizer) -> tuple[float, ...]:
        """Return the rate of every group, relative to what it would have; the processes share the windows."""
        parameters = [group["params"][0] for group in optimiser.param_groups]
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for window in self.probe[accelerator.process_index :: accelerator.num_processes]:
            num_tokens = max(int((window.targets != IGNORED).sum()), 1)
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=self.mixed_precision == "bf16"):
                loss = loss_share(self.model, window, accelerator.device, num_tokens)
            for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total += gradient.abs()
        with torch.no_grad():
            matters = [
                (parameter.abs() * accelerator.reduce(total, reduction="sum")).mean()
                for parameter, total in zip(parameters, sums, strict=True)
            ]
        importances: Tensor = torch.stack(matters).double() / len(self.probe)
        return rates_by(importances.tolist())


def rates_by(importances: Sequence[float]) -> tuple[float, ...]:
    """Return the rates of tensors by what they matter: 2 of the least, 0 of the most."""
    highest, lowest = max(importances), min(importances)
    if not (math.isfinite(sum(importances)) and highest > lowest):
        return (1.0,) * len(importances)
    return tuple(2.0 * (highest - importance) / (highest - lowest) for importance in importances)


def set_tensor_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Give every group its rate; none has one before the first measurement."""
    groups: list[dict[str, Any]] = optimiser.param_groups
    for group, rate in zip(groups, rates, strict=False):
        group[TENSOR_RATE] = rate
