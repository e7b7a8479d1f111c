"""What a training run cost: parameters, speed, memory; `final/cost.json`, for `scale compare`."""

from __future__ import annotations

import resource
import sys

import torch

from scale_cli.storage.records import Cost
from scale_cli.training.loop import TrainingRun


def measure_cost(run: TrainingRun) -> Cost:
    """Return what a run that has just ended cost."""
    parameters = list(run.model.parameters())
    device = run.accelerator.device
    return Cost(
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
