"""What a training run cost: parameters, speed, memory; `final/cost.json`, for `scale compare`."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from scale_cli.training.loop import TrainingRun


@dataclass(frozen=True)
class TrainingCost:
    """What a run cost.

    Args:
        trainable_parameters: that an optimiser moved.
        total_parameters: of the whole model in training, frozen ones included; a tied one counts once.
        tokens_per_s: target tokens over all processes, during optimiser steps only: no periodic evaluation, no
            checkpoint; over all resumes. None where no step was taken.
        peak_memory_bytes: of the main process since it started; on a GPU what PyTorch allocated there, elsewhere
            resident memory, the libraries' own included.
        device: `cpu`, or what the GPU calls itself.
        num_processes: that shared the work.
        saving_s: seconds that training has waited for checkpoints, over all resumes.
    """

    trainable_parameters: int
    total_parameters: int
    tokens_per_s: float | None
    peak_memory_bytes: int
    device: str
    num_processes: int
    saving_s: float

    def to_json(self) -> dict[str, Any]:
        """Return what `cost.json` holds."""
        return asdict(self)


def measure_cost(run: TrainingRun) -> TrainingCost:
    """Return what a run that has just ended cost."""
    parameters = list(run.model.parameters())
    device = run.accelerator.device
    return TrainingCost(
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        total_parameters=sum(p.numel() for p in parameters),
        tokens_per_s=run.state.tokens_per_s,
        peak_memory_bytes=_peak_memory_bytes(device),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        num_processes=run.accelerator.num_processes,
        saving_s=round(run.state.saving_s, 4),
    )


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
