"""Steps, and the hooks around them, without a run."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, PackedWindows
from scale_cli.methods.recipes import Hook, Training, make_hooks
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import TakenStep, train_step
from tests.widening import random_ids


def training_of(
    train: TrainConfig, model: Any = None, method: MethodConfig | None = None
) -> Training:
    """Return what hooks are made of."""
    config = SimpleNamespace(train=train, method=method or MethodConfig())
    accelerator = Accelerator(cpu=True)
    return Training(
        config=config, model=model, wrapped=model, accelerator=accelerator, batches=None
    )


def hooks_for(model: Any, train: TrainConfig, method: MethodConfig | None = None) -> list[Hook]:
    """Return the hooks of a run that begins with a model as it is."""
    return make_hooks(training_of(train, model, method))


def batches_of(micro_batch_size: int, global_batch_size: int = 8, window: int = 16) -> Batches:
    """Return batches of random ids.

    Of 301 ids in windows of 16 the last has 12 targets, so micro-batches differ in their number.
    """
    ids = random_ids(301, seed=1).numpy()
    return Batches(
        [PackedWindows(ids, window)],
        [1.0],
        num_steps=20,
        seed=0,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
    )


@dataclass
class Steps:
    """A model, and what takes its steps."""

    model: Any
    train: TrainConfig
    batches: Batches
    method: MethodConfig | None = None
    wrapped: Any = None

    def __post_init__(self) -> None:
        self.optimiser = build_optimiser(self.model, self.train)
        self.hooks = hooks_for(self.model, self.train, self.method)
        self.wrapped = self.wrapped or for_training(self.model.train(), self.train)
        self.accelerator = Accelerator(cpu=True)

    def take(self, step: int, **options: Any) -> TakenStep:
        batch = self.batches.of_step(step)
        options["hooks"] = self.hooks
        return train_step(
            self.accelerator, self.wrapped, self.optimiser, batch, self.train, **options
        )
