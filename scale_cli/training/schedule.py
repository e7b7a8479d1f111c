"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from scale_cli.config.training import TrainConfig

# Of max_steps: a phase whose length a config leaves out.
_SHARE_OF_A_PHASE = 0.2


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step (0 is the first).

    Linear warm-up to `lr` over `warmup_steps`, the first step at lr / warmup_steps; then what `SCHEDULES` says.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    return train.lr * SCHEDULES[train.schedule](step, train)


def _cosine(step: int, train: TrainConfig) -> float:
    return _between(1.0, train.min_lr_ratio, _progress(step, train), "cosine")


def _linear(step: int, train: TrainConfig) -> float:
    return _between(1.0, train.min_lr_ratio, _progress(step, train), "linear")


def _progress(step: int, train: TrainConfig) -> float:
    """Return how far a step is, 1 being the last step (two steps after the warm-up at the least)."""
    return (step - train.warmup_steps) / max(1, train.max_steps - 1 - train.warmup_steps)


def _constant(_step: int, _train: TrainConfig) -> float:
    return 1.0


def _wsd(step: int, train: TrainConfig) -> float:
    """Constant, decay (Hu et al. 2024, arXiv 2404.06395)."""
    decay_steps = train.decay_steps
    if decay_steps is None:
        decay_steps = min(round(_SHARE_OF_A_PHASE * train.max_steps), train.max_steps - train.warmup_steps)
    rate = _decayed(step, train, 1.0, decay_steps)
    return 1.0 if rate is None else rate


def _infinite(step: int, train: TrainConfig) -> float:
    """Cool-down, constant, decay (Ibrahim et al. 2024, arXiv 2403.08763); what is left out takes what is left at most.

    The last step of a cool-down is at the constant rate, and the last one of all at the minimum; so the first step of a
    phase has left the rate of the one before, also where that phase was another run's (`init_from`).
    """
    usual, free = round(_SHARE_OF_A_PHASE * train.max_steps), train.max_steps - train.warmup_steps
    cooldown_steps, decay_steps = train.cooldown_steps, train.decay_steps
    if cooldown_steps is None:
        cooldown_steps = min(usual, free - (decay_steps or 0))
    if decay_steps is None:
        decay_steps = min(usual, free - cooldown_steps)
    constant = train.constant_lr_ratio
    if (rate := _decayed(step, train, constant, decay_steps)) is not None:
        return rate
    cooled = step + 1 - train.warmup_steps
    return _between(1.0, constant, cooled / cooldown_steps, "cosine") if cooled < cooldown_steps else constant


def _decayed(step: int, train: TrainConfig, constant: float, decay_steps: int) -> float | None:
    """Return the rate of a step of the last phase; None before it."""
    decayed = step + 1 - (train.max_steps - decay_steps)
    if decayed <= 0:
        return None
    return _between(constant, train.min_lr_ratio, decayed / decay_steps, train.shape_of_decay)


# From a step after the warm-up to its rate, relative to `train.lr`.
SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "infinite": _infinite,
}


def _between(high: float, low: float, progress: float, shape: str) -> float:
    if shape == "exponential":
        return high * (low / high) ** progress
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[shape]
    return low + (high - low) * remaining
