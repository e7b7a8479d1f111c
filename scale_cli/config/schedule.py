"""The learning rate as a pure function of the step: `SCHEDULES` is the whole list."""

from __future__ import annotations

import math
from collections.abc import Callable

from scale_cli.config.training import Schedule, TrainConfig

# Default of decay_steps, as a share of max_steps.
_SHARE_OF_DECAY = 0.2


# Of a run's work, what the search of `train.lr: auto` may take. A sequence that it reads takes a
# step's work, and as many again are read once for each of a dozen rates. To read is a third of full
# fine-tuning's work, and half of LoRA's, which asks for few gradients.
_SEARCHED_SHARE = 0.05
_SEARCH_WORK = 1 + 12 / 2
# A gradient of fewer sequences is mostly noise where a base knows the text (docs/results/rates.md).
_LEAST_SEARCHED = 4


def searched_sequences(train: TrainConfig, num_processes: int = 1) -> int:
    """Return of how many sequences `train.lr: auto` takes its gradient, and by as many judges it."""
    affordable = int(_SEARCHED_SHARE * train.max_steps * train.global_batch_size / _SEARCH_WORK)
    wanted = min(train.global_batch_size, max(_LEAST_SEARCHED, affordable))
    return math.ceil(wanted / num_processes) * num_processes


def search_steps(train: TrainConfig) -> float:
    """Return the work of finding the rate, in steps of the run."""
    if train.lr != "auto":
        return 0.0
    return _SEARCH_WORK * searched_sequences(train) / train.global_batch_size


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
