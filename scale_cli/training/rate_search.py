"""Finds the learning rate of a run, where `train.lr` is `auto`: by a line search along its first update.

The first update is as long as the rate says, so one gradient gives the weights after it at any rate. Text that was not
read for the gradient tells how far the update lowers its loss. A gradient that is mostly noise, as where a base knows
the text well, does harm early. Source: ours (docs/results/rates.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.amp import GradScaler

from scale_cli.config.schedule import searched_sequences
from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import StepBatches
from scale_cli.data.corpora import build_batches
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.methods.recipes import Training, local_part, trainable_parameters
from scale_cli.processes import autocast
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.sharding import gathered_roots
from scale_cli.training.step import loss_share, train_step

# Rates that are tried are this far apart, and at most so many such steps from the first one.
_FACTOR = 2.0
_MOST_STEPS_AWAY = 10
# Near 0 the loss is a parabola in the rate. If this share of the best gain is reached first at r, the
# parabola's lowest point is at r / _SHARE_OF_WAY, and that rate is taken. Where the losses stay low far
# beyond, as for text that the base never saw, it is where that begins. Where a gain is so small that noise
# hides its beginning, the parabola through the losses at 0, the best rate and twice that ends earlier.
_SHARE_OF_GAIN = 0.9
_SHARE_OF_WAY = 1 - math.sqrt(1 - _SHARE_OF_GAIN)
# A smaller share of the loss is noise, as a gain and as harm.
_NOISE = 0.001


@dataclass(frozen=True)
class FoundRate:
    """A learning rate, and what it was found by."""

    lr: float
    # nats/token after one update at each rate that was tried; at 0, before it
    losses: dict[float, float]
    is_highest: bool = False  # of the method; the losses alone would tell a higher one

    def __str__(self) -> str:
        if not self.losses:
            return f"{self.lr:g}, the method's own"
        tried = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in sorted(self.losses.items()))
        highest = ", the highest that the method takes" if self.is_highest else ""
        return f"{self.lr:g}{highest}, by one update at each of some rates (loss of text that it has not read: {tried})"


def find_rate(training: Training, corpora: Sequence[TokenisedCorpus]) -> FoundRate:
    """Return the rate for a model at its start; every process must call this, and gets the same.

    Args:
        training: of the run; its model's weights are put back.
        corpora: the text to train on.
    """
    config: RunConfig = training.config
    method = config.method.definition
    first = method.usual_lr
    train = config.train
    if not method.first_update_tells(training.model):
        return FoundRate(first, {})

    accelerator = training.accelerator
    size = searched_sequences(train, accelerator.num_processes)
    share = size // accelerator.num_processes
    at_once = train.sequences_at_once(accelerator.num_processes)
    sizes = {
        "global_batch_size": size,
        "micro_batch_size": max(of for of in range(1, at_once + 1) if share % of == 0),
        "max_steps": 2,
    }
    sized = config.model_copy(update={"train": train.model_copy(update=sizes)})
    batches = build_batches(sized, corpora, accelerator.num_processes)
    if _windows(batches.of_step(0)) & _windows(batches.of_step(1)):  # of very little text
        return FoundRate(first, {})
    read, judged = (
        batches.of_step(step, accelerator.process_index, accelerator.num_processes)
        for step in range(2)
    )
    # Only the shape of the run's own batches is compiled.
    training.wrapped.train(not train.compile)
    search = LineSearch(
        accelerator=accelerator,
        model=training.model,
        wrapped=training.wrapped,
        train=sized.train,
        read=read,
        judged=judged,
    )
    return search.from_rate(first, method.highest_lr(config.method.settings))


def _windows(step: StepBatches) -> set[bytes]:
    return {ids.numpy().tobytes() for batch in step.micro_batches for ids in batch.input_ids}


@dataclass(frozen=True)
class LineSearch:
    """A model at its start, the batch of the first update, and the text that judges it."""

    accelerator: Accelerator
    model: nn.Module  # the trained model
    wrapped: nn.Module  # the same as it is run
    train: TrainConfig
    read: StepBatches  # this process's part of what gives the gradient
    judged: StepBatches  # of what judges

    def from_rate(self, first: float, highest: float = math.inf) -> FoundRate:
        """Return the rate that is found from a first one on; the weights are put back."""
        with self._along_update(first) as go_to:
            losses = {0.0: self.judged_loss_at(0.0, go_to)}

            def loss_at(power: int) -> float:
                rate = first * _FACTOR**power
                if rate not in losses:
                    losses[rate] = self.judged_loss_at(rate, go_to)
                return losses[rate]

            power = useful_power(loss_at, losses[0.0])
        found = float(f"{first * _FACTOR**power:.2g}")
        return FoundRate(min(found, highest), losses, is_highest=found > highest)

    def judged_loss_at(self, rate: float, go_to: Callable[[float], None]) -> float:
        """Return the judged text's loss, in nats/token, after an update at a rate; inf if not finite."""
        go_to(rate)
        device = self.accelerator.device
        num_tokens = max(1, sum(self.judged.num_targets))
        summed = torch.zeros((), device=device)
        # FSDP leaves what is outside the layers gathered after a forward pass alone: stale weights.
        with gathered_roots(self.wrapped), torch.no_grad():
            for micro_batch in self.judged.micro_batches:
                with autocast(device.type, self.train.mixed_precision):
                    summed += loss_share(self.wrapped, micro_batch.to(device), num_tokens)
        loss = float(self.accelerator.reduce(summed, reduction="sum"))
        return loss if math.isfinite(loss) else math.inf

    @contextmanager
    def _along_update(self, rate: float) -> Iterator[Callable[[float], None]]:
        """Take the first update at a rate; give a function that goes to the weights at another."""
        parameters = trainable_parameters(self.model)
        before = {name: _kept(parameter) for name, parameter in parameters.items()}
        settings = {"lr": rate, "schedule": "constant", "warmup_steps": 0}
        train = self.train.model_copy(update=settings)
        optimiser = build_optimiser(self.model, train)
        is_scaled = train.mixed_precision == "fp16"
        scaler = GradScaler(self.accelerator.device.type, enabled=is_scaled)
        update = partial(
            train_step, self.accelerator, self.wrapped, optimiser, self.read, train, scaler=scaler
        )
        while update().overflowed:
            pass  # the next one has a lower loss scale
        optimiser.state.clear()
        updates = {
            name: local_part(parameter.detach()) - before[name]
            for name, parameter in parameters.items()
        }

        @torch.no_grad()
        def go_to(other: float) -> None:
            for name, parameter in parameters.items():
                here = local_part(parameter)
                here.copy_(before[name])
                if other:
                    here.add_(updates[name], alpha=other / rate)

        try:
            yield go_to
        finally:
            go_to(0.0)


def useful_power(loss: Callable[[int], float], before: float) -> float:
    """Return how far one update should go, as a power of the factor between rates.

    Args:
        loss: of the judged text after an update at the first rate times the factor to this power.
        before: the loss before any update.
    """
    if before == math.inf:
        return 0.0
    best = _lower_while(0, lambda power: loss(power) == math.inf)
    for way in (1, -1):
        while abs(best + way) <= _MOST_STEPS_AWAY and loss(best + way) < loss(best):
            best += way
    gain = before - loss(best)
    if gain < _NOISE * before:
        # Of a parabola that hardly falls, where it has risen tells more than where it falls.
        harmless = _lower_while(0, lambda power: loss(power) > (1 + _NOISE) * before)
        if harmless == 0:
            return 0.0
        return harmless + _lowest_point(
            max(0.0, before - loss(harmless)), loss(harmless + 1) - before
        )

    # The first power that has enough of the gain lies between two that were tried.
    wanted = before - _SHARE_OF_GAIN * gain
    enough = _lower_while(best, lambda power: loss(power - 1) <= wanted)
    way_back = (wanted - loss(enough)) / (loss(enough - 1) - loss(enough))
    by_beginning = enough - way_back - math.log(_SHARE_OF_WAY, _FACTOR)
    harm = loss(best + 1) - before
    if not -gain <= harm < math.inf:  # lower still, or nothing is known
        return by_beginning
    return min(by_beginning, best + _lowest_point(gain, harm))


def _lowest_point(gain: float, harm: float) -> float:
    """Return where a parabola through 0 is lowest, as a power of the factor beyond a rate that has a
    gain; at the next rate that is tried it has done harm.
    """
    if math.isinf(harm):
        return math.log(1 / 2, _FACTOR)
    return math.log((harm + 4 * gain) / (harm + 2 * gain) / 2, _FACTOR)


def _lower_while(power: int, holds: Callable[[int], bool]) -> int:
    """Return the first power, from one downwards, at which a condition does not hold."""
    while power > -_MOST_STEPS_AWAY and holds(power):
        power -= 1
    return power


def _kept(parameter: nn.Parameter) -> Tensor:
    """Return a copy, in bfloat16 where that holds it exactly, as it does most bases' weights."""
    here = local_part(parameter.detach())
    half = here.to(torch.bfloat16)
    return half if torch.equal(half.to(here.dtype), here) else here.clone()
