"""One optimiser step, on one process or on many."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from scale_cli.config.schema import TrainConfig
from scale_cli.data.batches import BatchSource, MicroBatch
from scale_cli.errors import NonFiniteError
from scale_cli.training.optimiser import trainable_parameters
from scale_cli.training.schedule import learning_rate
from scale_cli.training.sharding import whole_tensor


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        loss: nats per target token, over the global batch, before the update.
        grad_norm: before clipping.
        lr: of the update.
        num_tokens: target tokens of the global batch.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int


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
) -> StepResult:
    """Accumulate the gradient of a global batch, clip it, and update.

    The loss of every micro-batch is divided by the target tokens of the whole global batch, so the gradient is that of
    one large batch however it is cut up.

    Args:
        accelerator: processes and devices.
        model: as Accelerate runs it, or sharded; its output has a loss.
        optimiser: over what trains.
        batches: of the whole run.
        step: counted from 0.
        train: learning rate, clipping, precision.
        between_micro_batches: what it raises ends the step before anything is updated.

    Raises:
        NonFiniteError: the loss or the gradient is not finite; the weights are left as they were.
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
    if not (torch.isfinite(loss) and torch.isfinite(grad_norm)):
        optimiser.zero_grad(set_to_none=True)
        raise NonFiniteError(f"step {step + 1}: loss {loss.item()}, gradient norm {grad_norm.item()}: not finite")
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(step, train)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return StepResult(loss.item(), grad_norm.item(), learning_rate(step, train), num_tokens)


def _loss_share(model: nn.Module, micro_batch: MicroBatch, device: torch.device, num_tokens: int) -> Tensor:
    """Return a micro-batch's summed loss over the global batch's targets, by the model's own loss function."""
    targets, position_ids = micro_batch.targets.to(device), micro_batch.position_ids
    # The targets are shifted already; transformers computes a loss only where labels are given too.
    output = model(
        input_ids=micro_batch.input_ids.to(device),
        position_ids=None if position_ids is None else position_ids.to(device),
        labels=targets,
        shift_labels=targets,
        num_items_in_batch=num_tokens,
        use_cache=False,
    )
    loss: Tensor = output.loss
    return loss
