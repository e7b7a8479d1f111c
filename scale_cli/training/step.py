"""One optimiser step, on one process or on many, without waiting for the device: its result is read
later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.amp import GradScaler

from scale_cli.config.schedule import learning_rate
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import MicroBatch, StepBatches
from scale_cli.errors import GradientOverflow, NonFiniteError
from scale_cli.methods.recipes import Hook, Update, trainable_parameters
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import autocast
from scale_cli.training.objective import ChunkedLossModel
from scale_cli.training.optimiser import set_learning_rate
from scale_cli.training.sharding import gradients_kept, whole_tensor

_UNSCALED = GradScaler(enabled=False)


class StepResult(NamedTuple):
    """What is known of a step once it has run."""

    loss: float  # nats per target token, over the global batch, before the update
    grad_norm: float  # before clipping
    # by source, (summed loss, number of targets); empty if the model gives no losses of single
    # tokens
    by_source: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class TakenStep:
    """A step that may still be running on its device."""

    step: int  # counted from 0
    # loss over the global batch before the update, gradient norm before clipping, loss scale, and,
    # if the model gives losses of single tokens, each source's summed loss
    figures: Tensor
    asked: Tensor  # sum of all processes' requests to stop; 0: none
    lr: float  # of the update
    num_targets: tuple[int, ...]  # of the global batch, by source
    # (layers + 1,), rms(u) / rms(x) in this process (`upscale/stream_ratios.py`), if it was
    # measured
    stream_ratios: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Target tokens of the global batch."""
        return sum(self.num_targets)

    @property
    def overflowed(self) -> bool:
        """Whether the gradient was too large for float16 under the loss scale; waits for it."""
        try:
            self.result()
        except NonFiniteError as error:
            return isinstance(error, GradientOverflow)
        return False

    def result(self, figures: Sequence[float] | None = None) -> StepResult:
        """Return the step's result, or raise NonFiniteError; wait for its figures unless they are
        given.
        """
        loss, grad_norm, scale, *of_sources = self.figures.tolist() if figures is None else figures
        if math.isfinite(loss) and not math.isfinite(grad_norm) and scale > 1.0:
            raise GradientOverflow(
                f"step {self.step + 1}: gradients overflowed float16 under a loss scale of {scale:g}"
            )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}: not finite"
            )
        by_source = tuple(zip(of_sources, self.num_targets, strict=True)) if of_sources else ()
        return StepResult(loss, grad_norm, by_source)


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: StepBatches,
    train: TrainConfig,
    between_micro_batches: Callable[[], None] = lambda: None,
    asked: Callable[[], int] = lambda: 0,
    hooks: Sequence[Hook] = (),
    scaler: GradScaler = _UNSCALED,
) -> TakenStep:
    """Accumulate the gradient of a global batch, clip it, and update unless loss or gradient is not
    finite.

    The loss of every micro-batch is divided by the target tokens of the whole global batch, so the
    gradient is that of one large batch however it is split. An error of `between_micro_batches`
    ends the step before any update.

    Args:
        accelerator: processes and devices.
        model: as Accelerate runs it, or sharded; its output has a loss.
        optimiser: over the trainable parameters; it skips the update if `found_inf` is set.
        batch: this process's part of the global batch.
        train: learning rate, clipping, precision.
        between_micro_batches: called after each micro-batch, so before the update too.
        asked: returns this process's request to stop.
        hooks: called around the update, the outermost first.
        scaler: of the loss, for float16; it learns whether gradients overflowed.
    """
    device = accelerator.device
    num_sources = len(batch.num_targets)
    num_tokens = max(sum(batch.num_targets), 1)  # a batch of conversations may have no targets
    sums_by_source = isinstance(
        getattr(model, "module", model), ScaleForCausalLM | ChunkedLossModel
    )
    # Request to stop, whole loss, then each source's loss.
    sums = torch.zeros(2 + sums_by_source * num_sources, device=device)
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        more_to_come = number < len(batch.micro_batches)
        here = micro_batch.to(device)
        losses_BT = torch.zeros(here.targets.shape, device=device) if sums_by_source else None
        with gradients_kept(model, accelerator) if more_to_come else nullcontext():
            with autocast(device.type, train.mixed_precision):
                share = loss_share(model, here, num_tokens, losses_BT)
            # Gradients are averaged over processes, but each process's loss is a part of a sum.
            accelerator.backward(scaler.scale(share * accelerator.num_processes))
        sums[1] += share.detach()
        # Summed without an atomic addition, so that a GPU gives the same bits again.
        if losses_BT is not None:
            is_of_SB = here.sources == torch.arange(num_sources, device=device).unsqueeze(1)
            sums[2:] += torch.where(is_of_SB, losses_BT.sum(dim=1), 0.0).sum(dim=1)
        between_micro_batches()
    sums[0] = asked()
    sums = accelerator.reduce(sums, reduction="sum")
    loss_scale = scaler.scale(torch.ones(1, device=device))
    scaler.unscale_(optimiser)
    parameters = list(trainable_parameters(model).values())
    grad_norm = whole_tensor(torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm))
    figures = torch.cat([sums[1:2], grad_norm.float().view(1), loss_scale, sums[2:]])
    lr = learning_rate(batch.step, train)
    set_learning_rate(optimiser, lr)
    _update(Update(batch.step, optimiser, torch.isfinite(figures).all()), hooks, scaler)
    return TakenStep(batch.step, figures, sums[0], lr, batch.num_targets)


def _update(update: Update, hooks: Sequence[Hook], scaler: GradScaler) -> None:
    """Update what trains, with the hooks before and after, and drop the gradients.

    If the step is not finite, weights, moments and step counts stay: the device decides that,
    without a wait.
    """
    for hook in hooks:
        hook.before(update)
    # As scalers tell a fused optimiser (`torch/optim/adam.py`).
    update.optimiser.found_inf = (~update.finite).float()
    update.optimiser.step()
    del update.optimiser.found_inf
    scaler.update()
    for hook in reversed(hooks):
        hook.after(update)
    update.optimiser.zero_grad(set_to_none=True)


def loss_share(
    model: nn.Module, batch: MicroBatch, num_tokens: int, losses_BT: Tensor | None = None
) -> Tensor:
    """Return a micro-batch's summed loss divided by the global batch's targets, by the model's own
    loss function.
    """
    # Only our own models accept these arguments.
    ours: dict[str, Any] = (
        {} if batch.distillation is None else {"distillation": batch.distillation}
    )
    if losses_BT is not None:
        ours["token_losses"] = losses_BT
    # The targets are already shifted; transformers computes a loss only if labels are given too.
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        labels=batch.targets,
        shift_labels=batch.targets,
        num_items_in_batch=num_tokens,
        use_cache=False,
        **ours,
    )
    loss: Tensor = output.loss
    return loss
