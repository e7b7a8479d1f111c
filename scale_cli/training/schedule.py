"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from scale_cli.config.schema import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step (0 is the first).

    Linear warm-up to `lr` over `warmup_steps`, the first step at lr / warmup_steps; then `cosine` or `linear` decay
    that reaches `lr * min_lr_ratio` at the last step (two steps after the warm-up at the least), or none (`constant`).
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    last_step = train.max_steps - 1
    progress = (step - train.warmup_steps) / max(1, last_step - train.warmup_steps)
    remaining = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[train.schedule]
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * remaining)
