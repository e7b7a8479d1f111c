"""Hooks without a run around them."""

from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import Hook, Training, make_hooks


def training_of(
    train: TrainConfig, model: Any = None, method: MethodConfig | None = None
) -> Training:
    """Return what hooks are made of."""
    config = SimpleNamespace(train=train, method=method or MethodConfig())
    return Training(
        config=config,
        model=model,
        wrapped=model,
        accelerator=Accelerator(cpu=True),
        batches=None,
    )


def hooks_for(model: Any, train: TrainConfig, method: MethodConfig | None = None) -> list[Hook]:
    """Return the hooks of a run that begins with a model as it is."""
    return make_hooks(training_of(train, model, method))
