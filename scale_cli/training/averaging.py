"""`train.average`: the mean of what trains over steps, which is what `final/` holds.

It is kept in the optimiser's state, beside the moments, and is saved, sharded and resumed as they are. How many steps
are in it follows from the step alone; with the first of them it begins anew, whatever was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from scale_cli.config.training import TrainConfig
from scale_cli.errors import RunFolderError
from scale_cli.training.sharding import local_part

AVERAGE = "average"


def first_averaged(train: TrainConfig) -> int | None:
    """Return the first step (0 is the first of all) whose outcome is in the average; None where none is kept."""
    if train.average is None:
        return None
    return max(0, train.max_steps - train.averaged_steps) if train.average.kind == "tail" else 0


def check_same_average(where: Path, step: int, before: TrainConfig, now: TrainConfig) -> None:
    """Refuse to go on with an average that has begun at another step, which a change of `max_steps` may ask for."""
    begins = first_averaged(now)
    if begins is not None and first_averaged(before) != begins < step:
        least = f"give at least train.max_steps={step + now.averaged_steps}, or an earlier checkpoint"
        raise RunFolderError(f"{where}: train.average: its steps, from {begins + 1} on, were not averaged; {least}")


@torch.no_grad()
def update_average(optimiser: torch.optim.Optimizer, step: int, train: TrainConfig) -> None:
    """Take what a step has made of the parameters into their average, where the step is one that counts.

    Of `tail` the mean over the last steps. Of `ema` every step weighs 1 - 1/n of the one after it, n being
    `average.steps`; over the first n steps it is their mean, so that the start weighs nothing.
    """
    begins = first_averaged(train)
    if train.average is None or begins is None or step < begins:
        return
    num_before = step - begins
    if train.average.kind == "ema":
        num_before = min(num_before, train.averaged_steps - 1)
    averages, parameters = [], []
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            average = optimiser.state[parameter].setdefault(AVERAGE, torch.zeros_like(parameter))
            averages.append(local_part(average))
            parameters.append(local_part(parameter))
    get_swa_multi_avg_fn()(averages, parameters, num_before)


def has_average(optimiser: torch.optim.Optimizer) -> bool:
    """Return whether an average has begun."""
    return any(AVERAGE in state for state in optimiser.state.values())


@contextmanager
def averaged(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Let the parameters be their average for a while, where there is one."""
    _swap(optimiser)
    try:
        yield
    finally:
        _swap(optimiser)


@torch.no_grad()
def _swap(optimiser: torch.optim.Optimizer) -> None:
    for parameter, state in optimiser.state.items():
        if AVERAGE in state:
            # In place: a sharded model knows its parts by where they lie.
            one, other = local_part(parameter), local_part(state[AVERAGE])
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
