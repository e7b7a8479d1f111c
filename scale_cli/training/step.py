"""One optimiser step, on one process or on many, without waiting for the device: what it came to is asked for later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import BatchSource, MicroBatch
from scale_cli.errors import NonFiniteError
from scale_cli.training.anchors import decay_to_start, lookahead, project
from scale_cli.training.averaging import update_average
from scale_cli.training.optimiser import set_learning_rate, trainable_parameters
from scale_cli.training.schedule import learning_rate
from scale_cli.training.sharding import whole_tensor


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float  # nats per target token, over the global batch, before the update
    grad_norm: float  # before clipping
    lr: float  # of the update
    num_tokens: int  # target tokens of the global batch


@dataclass(frozen=True)
class TakenStep:
    """A step that may still be under way on its device."""

    step: int  # counted from 0
    figures: Tensor  # (2,), the loss over the global batch before the update, and the gradient's norm before clipping
    lr: float  # of the update
    num_tokens: int  # target tokens of the global batch
    # (layers + 1,), rms(u) / rms(x) in this process (`upscale/streams.py`), where it was measured
    stream_ratios: Tensor | None = None

    def result(self) -> StepResult:
        """Wait for the step, and return what it did."""
        ((loss, grad_norm),) = figures_of([self])
        return self.with_figures(loss, grad_norm)

    def with_figures(self, loss: float, grad_norm: float) -> StepResult:
        """Return what the step did, its figures being known."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}: not finite")
        return StepResult(loss, grad_norm, self.lr, self.num_tokens)


def figures_of(steps: Sequence[TakenStep]) -> list[tuple[float, float]]:
    """Return the loss and the gradient's norm of some steps, in one transfer from the device."""
    return [(loss, norm) for loss, norm in torch.stack([step.figures for step in steps]).tolist()]


def _nothing() -> None:
    """Between two micro-batches."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: BatchSource,
    step: int,
    train: TrainConfig,
    between_micro_batches: Callable[[], None] = _nothing,
) -> TakenStep:
    """Accumulate the gradient of a global batch, clip it, and update; where it is not finite, update nothing.

    The loss of every micro-batch is divided by the target tokens of the whole global batch, so the gradient is that of
    one large batch however it is cut up.

    Args:
        accelerator: processes and devices.
        model: as Accelerate runs it, or sharded; its output has a loss.
        optimiser: over what trains; a fused one, whose kernel leaves everything as it was where it is told to.
        batches: of the whole run.
        step: counted from 0.
        train: learning rate, clipping, precision, lookahead, average.
        between_micro_batches: what it raises ends the step before anything is updated.
    """
    num_tokens = batches.num_target_tokens(step)
    micro_batches = list(batches.micro_batches(step, accelerator.process_index, accelerator.num_processes))
    loss = torch.zeros((), device=accelerator.device)
    for index, micro_batch in enumerate(micro_batches):
        if index:
            between_micro_batches()
        last = index == len(micro_batches) - 1
        # A sharded model knows no such pause: it reduces every time (`training/sharding.py`).
        with nullcontext() if last else accelerator.no_sync(model):
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=train.mixed_precision == "bf16"):
                share = _loss_share(model, micro_batch, accelerator.device, num_tokens)
            # Processes average their gradients; each holds a part of a sum.
            accelerator.backward(share * accelerator.num_processes)
        loss += share.detach()
    loss = accelerator.reduce(loss, reduction="sum")
    parameters = list(trainable_parameters(model).values())
    grad_norm = whole_tensor(torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm))
    figures = torch.stack([loss, grad_norm.float()])
    lr = learning_rate(step, train)
    set_learning_rate(optimiser, lr)
    with lookahead(optimiser, step, train):
        _update_where_finite(optimiser, figures, train.weight_decay)
    update_average(optimiser, step, train)
    optimiser.zero_grad(set_to_none=True)
    return TakenStep(step, figures, lr, num_tokens)


def _update_where_finite(optimiser: Any, figures: Tensor, weight_decay: float) -> None:
    """Update, or leave weights, moments and step counts as they are: the device decides, this process does not wait."""
    finite = torch.isfinite(figures).all()
    decay_to_start(optimiser, weight_decay, finite)
    # What gradient scalers tell a fused optimiser by (`torch/optim/adam.py`).
    optimiser.found_inf = (~finite).float()
    try:
        optimiser.step()
    finally:
        del optimiser.found_inf
    project(optimiser, finite)


def _loss_share(model: nn.Module, micro_batch: MicroBatch, device: torch.device, num_tokens: int) -> Tensor:
    """Return a micro-batch's summed loss over the global batch's targets, by the model's own loss function."""
    batch = micro_batch.to(device)
    # Only widened models know of it; to any other it would be a key too many.
    distilled = {} if batch.distillation is None else {"distillation": batch.distillation}
    # The targets are shifted already; transformers computes a loss only where labels are given too.
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        labels=batch.targets,
        shift_labels=batch.targets,
        num_items_in_batch=num_tokens,
        use_cache=False,
        **distilled,
    )
    loss: Tensor = output.loss
    return loss
