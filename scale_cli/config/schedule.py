"""The learning rate as a pure function of the step: `SCHEDULES` is the whole list."""

from __future__ import annotations

import math
from collections.abc import Callable

from scale_cli.config.training import Schedule, TrainConfig

# Default of decay_steps, as a share of max_steps.
_SHARE_OF_DECAY = 0.2


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step (0 is the first).

    Linear warm-up to `lr` over `warmup_steps`, the first step at lr / warmup_steps; then a schedule
    of `SCHEDULES`, from `lr` down to `min_lr_ratio` of it.
    """
    if step < train.warmup_steps:
        return train.peak_lr * (step + 1) / train.warmup_steps
    low = train.min_lr_ratio
    return train.peak_lr * (low + (1.0 - low) * SCHEDULES[train.schedule](step, train))


def _cosine(step: int, train: TrainConfig) -> float:
    """Half a cosine from the end of the warm-up to the last step."""
    progress = (step - train.warmup_steps) / max(1, train.max_steps - 1 - train.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd(step: int, train: TrainConfig) -> float:
    """Constant, then down by 1 - sqrt (Hu et al. 2024, arXiv 2404.06395); the last step is at the
    minimum.
    """
    decay_steps = train.decay_steps
    if decay_steps is None:
        most = train.max_steps - train.warmup_steps
        decay_steps = min(round(_SHARE_OF_DECAY * train.max_steps), most)
    decayed = step + 1 - (train.max_steps - decay_steps)
    return 1.0 if decayed <= 0 else 1.0 - math.sqrt(decayed / decay_steps)


# By the config's names: functions that map a step after the warm-up to what is left of the way
# down.
SCHEDULES: dict[Schedule, Callable[[int, TrainConfig], float]] = {
    "cosine": _cosine,
    "constant": lambda _step, _train: 1.0,
    "wsd": _wsd,
}
