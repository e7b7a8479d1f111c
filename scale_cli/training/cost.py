"""What a training run cost: parameters, speed, memory; `final/cost.json`, for `scale compare`."""

from __future__ import annotations

from scale_cli.planning.device import device_name, peak_memory_bytes
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
        peak_memory_bytes=peak_memory_bytes(device),
        device=device_name(device),
        num_processes=run.accelerator.num_processes,
        saving_s=round(run.state.saving_s, 4),
    )
