"""Hooks without a run around them."""

from typing import Any

import torch
from accelerate import Accelerator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import Hook, Training, copy_start
from scale_cli.training.step import hooks_of


def training_of(train: TrainConfig, model: Any = None) -> Training:
    """Return what recipes are made of."""
    return Training(
        model, train, {}, Accelerator(cpu=True), lambda _: [], lambda _: torch.zeros(())
    )


def hooks_for(model: Any, train: TrainConfig, method: MethodConfig | None = None) -> list[Hook]:
    """Return the hooks of a run that begins with a model as it is."""
    start, accelerator = copy_start(model, train), Accelerator(cpu=True)
    return hooks_of(method or MethodConfig(), train, model, model, accelerator, start, lambda _: [])
