"""Hooks without a run around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import Hook, Training, Update, copy_start
from scale_cli.training.step import hooks_of


def training_of(train: TrainConfig, model: Any = None, start: Mapping[str, Tensor] | None = None) -> Training:
    """Return what recipes are made of."""
    return Training(model, train, start or {}, Accelerator(cpu=True), lambda _: [], lambda _: torch.zeros(()))


def hooks_for(model: Any, train: TrainConfig, method: MethodConfig | None = None, wrapped: Any = None) -> list[Hook]:
    """Return the hooks of a run that begins with a model as it is."""
    start, accelerator = copy_start(model, train), Accelerator(cpu=True)
    return hooks_of(method or MethodConfig(), train, model, wrapped or model, accelerator, start, lambda _: [])


@contextmanager
def around(hooks: Sequence[Hook], optimiser: Any, step: int) -> Iterator[None]:
    """Let hooks act around an update that is made within."""
    update = Update(step, optimiser, torch.tensor(True))
    for hook in hooks:
        hook.before(update)
    yield
    for hook in reversed(hooks):
        hook.after(update)
