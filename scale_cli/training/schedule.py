"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from scale_cli.config.training import PHASED, TrainConfig

# Of max_steps: a phase whose length a config leaves out.
_SHARE_OF_A_PHASE = 0.2


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step (0 is the first).

    Linear warm-up to `lr` over `warmup_steps`, the first step at lr / warmup_steps; then `cosine` or `linear` decay
    that reaches `lr * min_lr_ratio` at the last step (two steps after the warm-up at the least), or none (`constant`),
    or phases (`wsd`: Hu et al. 2024, arXiv 2404.06395; `infinite`: Ibrahim et al. 2024, arXiv 2403.08763).
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    if train.schedule in PHASED:
        return train.lr * _in_phases(step, train)
    assert train.schedule in ("cosine", "linear"), train.schedule
    last_step = train.max_steps - 1
    progress = (step - train.warmup_steps) / max(1, last_step - train.warmup_steps)
    return train.lr * _between(1.0, train.min_lr_ratio, progress, train.schedule)


def _in_phases(step: int, train: TrainConfig) -> float:
    """Return the rate of a step after the warm-up, relative to `lr`: cool-down, constant, decay.

    The last step of a cool-down is at the constant rate, and the last one of all at the minimum; so the first step of a
    phase has left the rate of the one before, also where that phase was another run's (`init_from`).
    """
    cooldown_steps, decay_steps = _phases(train)
    constant = train.constant_lr_ratio if train.schedule == "infinite" else 1.0
    decayed = step + 1 - (train.max_steps - decay_steps)
    if decayed > 0:
        return _between(constant, train.min_lr_ratio, decayed / decay_steps, train.shape_of_decay)
    cooled = step + 1 - train.warmup_steps
    if cooled < cooldown_steps:
        return _between(1.0, constant, cooled / cooldown_steps, "cosine")
    return constant


def _phases(train: TrainConfig) -> tuple[int, int]:
    """Return the steps of cool-down and of decay; what is left out never takes more than is left."""
    usual, free = round(_SHARE_OF_A_PHASE * train.max_steps), train.max_steps - train.warmup_steps
    decay_steps = train.decay_steps
    if train.schedule == "wsd":
        return 0, min(usual, free) if decay_steps is None else decay_steps
    cooldown_steps = train.cooldown_steps
    if cooldown_steps is None:
        cooldown_steps = min(usual, free - (decay_steps or 0))
    return cooldown_steps, min(usual, free - cooldown_steps) if decay_steps is None else decay_steps


def _between(high: float, low: float, progress: float, shape: str) -> float:
    if shape == "exponential":
        return high * (low / high) ** progress
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[shape]
    return low + (high - low) * remaining
