"""Finds the learning rate of a run, where `train.lr` is `auto`: by a line search along its first update, then by
short branches of several.

The first update is as long as the rate says, so one gradient gives the weights after it at any rate. Text that was not
read for the gradient tells how far the update lowers its loss. A gradient that is mostly noise, as where a base knows
the text well, does harm early. Later updates differ from the first, so branches from the same start at rates beside
the one that it tells decide, where the run is long enough to pay for them. Source: ours (docs/results/rates.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.amp import GradScaler

from scale_cli.config.schema import RunConfig
from scale_cli.config.search import MOST_BRANCHES, search_size
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, Batches, StepBatches
from scale_cli.data.corpora import build_batches
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import NonFiniteError
from scale_cli.methods.recipes import (
    Hook,
    Training,
    local_part,
    make_hooks,
    trainable_parameters,
)
from scale_cli.processes import autocast, shorter_timeout
from scale_cli.terminal import progress_bar
from scale_cli.training.objective import running_plain_layers
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
_MOST_NOISY = 3  # rates in a row


@dataclass(frozen=True)
class FoundRate:
    """A learning rate, and what it was found by."""

    lr: float
    # nats/token after the updates at each rate that was tried; at 0, before them
    losses: dict[float, float]
    num_updates: int = 1
    is_highest: bool = False  # of the method; the losses alone would tell a higher one
    why_own: str = ""  # why it is the method's own rate; empty: it was found

    def __str__(self) -> str:
        if self.why_own:
            return f"{self.lr:g}, the method's own: {self.why_own}"
        tried = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in sorted(self.losses.items()))
        highest = ", the highest that the method takes" if self.is_highest else ""
        updates = "one update" if self.num_updates == 1 else f"{self.num_updates} updates"
        return (
            f"{self.lr:g}{highest}, by {updates} at each of the rates around it (loss of text that is not read for "
            f"them: {tried})"
        )

    def at_most(self, highest: float) -> FoundRate:
        return replace(self, lr=highest, is_highest=True) if self.lr > highest else self


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
        return FoundRate(first, {}, why_own="its start has rates that go with it")

    accelerator = training.accelerator
    size = search_size(
        train,
        sequence_length=config.corpus.sequence_length,
        num_parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        num_processes=accelerator.num_processes,
    )
    share = size.num_sequences // accelerator.num_processes
    at_once = train.sequences_at_once(accelerator.num_processes)
    sizes = {
        "global_batch_size": size.num_sequences,
        "micro_batch_size": max(of for of in range(1, at_once + 1) if share % of == 0),
        "max_steps": max(1, size.num_updates) + 1,
    }
    sized = config.model_copy(update={"train": train.model_copy(update=sizes)})
    batches = build_batches(sized, corpora, accelerator.num_processes)
    parts = read_and_judged(batches, accelerator.process_index, accelerator.num_processes)
    if parts is None:
        return FoundRate(first, {}, why_own="there is too little text to judge others by")

    read, judged = parts
    training.wrapped.train()
    with (
        running_plain_layers(training.model) if train.compile else nullcontext(),
        shorter_timeout(),
        progress_bar(
            desc="finding the rate",
            unit=" rates",
            leave=False,
            disable=not accelerator.is_main_process,
        ) as bar,
    ):
        search = RateSearch(
            accelerator=accelerator,
            model=training.model,
            wrapped=training.wrapped,
            train=sized.train,
            read=read,
            judged=judged,
            make_hooks=partial(make_hooks, training),
            on_judged=bar.update,
        )
        return search.from_rate(first, highest=method.highest_lr(config.method.settings))


def read_and_judged(
    batches: Batches, rank: int, num_processes: int
) -> tuple[list[StepBatches], StepBatches] | None:
    """Return a process's parts of the steps that give updates and of one that judges them, without targets in
    windows that those read; None if hardly any text is left to judge by.
    """
    learned = [step for step in range(batches.num_steps) if any(batches.of_step(step).num_targets)]
    if len(learned) < 2:
        return None
    judging = learned.pop(1)
    whole = batches.of_step(judging)
    for steps in (learned, learned[:1]):  # branches read all of very little text
        seen = {window for step in steps for window in _windows(batches.of_step(step))}
        unseen = _without(seen, whole)
        if 4 * sum(unseen.num_targets) < sum(whole.num_targets):
            continue
        parts = [batches.of_step(step, rank, num_processes) for step in steps]
        judged = _without(seen, batches.of_step(judging, rank, num_processes))
        return (
            [replace(part, step=place) for place, part in enumerate(parts)],
            replace(judged, num_targets=unseen.num_targets),
        )
    return None


def _windows(step: StepBatches) -> list[bytes]:
    return [ids.numpy().tobytes() for batch in step.micro_batches for ids in batch.input_ids]


def _without(seen: set[bytes], step: StepBatches) -> StepBatches:
    """Return batches of the same shape without targets in windows that were seen."""
    windows = iter(_windows(step))
    num_targets = torch.zeros(len(step.num_targets), dtype=torch.long)
    micro_batches = []
    for batch in step.micro_batches:
        is_seen_B = torch.tensor([next(windows) in seen for _ in batch.input_ids])
        targets = batch.targets.masked_fill(is_seen_B.unsqueeze(1), IGNORED)
        num_targets.index_add_(0, batch.sources, (targets != IGNORED).sum(dim=1))
        micro_batches.append(replace(batch, targets=targets))
    return StepBatches(step.step, micro_batches, tuple(num_targets.tolist()))


class _Start:
    """The weights of what trains, before any update; in main memory, so a device needs no more than for a step."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable_parameters(model)
        self.weights = {name: _kept(weight) for name, weight in self.parameters.items()}

    def updates(self) -> dict[str, Tensor]:
        """Return how far the weights have moved."""
        return {
            name: local_part(parameter.detach()) - self.weights[name].to(parameter.device)
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def go_back(self) -> None:
        for name, parameter in self.parameters.items():
            local_part(parameter).copy_(self.weights[name])

    @torch.no_grad()
    def go_along(self, updates: dict[str, Tensor], times: float) -> None:
        """Go from the start as many times as far as updates went."""
        self.go_back()
        for name, parameter in self.parameters.items():
            local_part(parameter).add_(updates[name], alpha=times)


@dataclass(frozen=True)
class RateSearch:
    """A model at its start, the batches of the first updates, and the text that judges them."""

    accelerator: Accelerator
    model: nn.Module  # the trained model
    wrapped: nn.Module  # the same as it is run
    train: TrainConfig
    read: Sequence[StepBatches]  # this process's part of what gives the gradients; one: no branches
    judged: StepBatches  # of what judges
    make_hooks: Callable[[], Sequence[Hook]] = tuple  # those that run around a run's updates
    on_judged: Callable[[], object] = lambda: None  # after each rate that was tried

    def from_rate(self, first: float, highest: float = math.inf) -> FoundRate:
        """Return the rate that is found from a first one on; the weights are put back.

        Args:
            first: the first rate that is tried.
            highest: that many updates bear, whatever the first ones do.
        """
        start = _Start(self.model)
        try:
            found = self._by_one_update(first, start).at_most(highest)
            if len(self.read) > 1:
                found = self._by_branches(found, start).at_most(highest)
            return found
        finally:
            start.go_back()

    def judged_loss(self) -> float:
        """Return the judged text's loss, in nats/token; inf if it is not finite."""
        device = self.accelerator.device
        num_tokens = max(1, sum(self.judged.num_targets))
        summed = torch.zeros((), device=device)
        # FSDP leaves what is outside the layers gathered after a forward pass alone: stale weights.
        with gathered_roots(self.wrapped), torch.no_grad():
            for micro_batch in self.judged.micro_batches:
                with autocast(device.type, self.train.mixed_precision):
                    summed += loss_share(self.wrapped, micro_batch.to(device), num_tokens)
        loss = float(self.accelerator.reduce(summed, reduction="sum"))
        self.on_judged()
        return loss if math.isfinite(loss) else math.inf

    def _by_one_update(self, first: float, start: _Start) -> FoundRate:
        losses = {0.0: self.judged_loss()}
        try:
            whole = {"lr": first, "schedule": "constant", "warmup_steps": 0, "on_nonfinite": "stop"}
            self._update(self.read[:1], whole)
        except NonFiniteError:
            return FoundRate(first, losses, why_own="the first gradient is not finite")
        updates = start.updates()

        def loss_at(power: int) -> float:
            rate = first * _FACTOR**power
            if rate not in losses:
                start.go_along(updates, times=rate / first)
                losses[rate] = self.judged_loss()
            return losses[rate]

        power = useful_power(loss_at, losses[0.0])
        return FoundRate(float(f"{first * _FACTOR**power:.2g}"), losses)

    def _by_branches(self, near: FoundRate, start: _Start) -> FoundRate:
        losses = {0.0: near.losses[0.0]}

        def loss_at(power: int) -> float:
            rate = near.lr * _FACTOR**power
            start.go_back()
            try:
                # The rate falls as in a run: what a high one leaves to lower ones does not count.
                falling = {"schedule": "cosine", "warmup_steps": 1, "max_steps": len(self.read) + 1}
                self._update(self.read, {"lr": rate, **falling})
                losses[rate] = self.judged_loss()
            except NonFiniteError:
                losses[rate] = math.inf
            return losses[rate]

        power = lowest_power(loss_at)
        found = float(f"{near.lr * _FACTOR**power:.2g}")
        return FoundRate(found, losses, num_updates=len(self.read))

    def _update(self, read: Sequence[StepBatches], settings: dict[str, Any]) -> None:
        """Take an update by each batch, with settings of `train`.

        Raises:
            NonFiniteError: a gradient is not finite, and the run would stop there.
        """
        train = self.train.model_copy(update=settings)
        optimiser = build_optimiser(self.model, train)
        hooks = self.make_hooks()
        is_scaled = train.mixed_precision == "fp16"
        scaler = GradScaler(self.accelerator.device.type, enabled=is_scaled)
        for batch in read:
            update = partial(
                train_step,
                self.accelerator,
                self.wrapped,
                optimiser,
                batch,
                train,
                hooks=hooks,
                scaler=scaler,
            )
            while (taken := update()).overflowed:
                pass  # the next one has a lower loss scale
            if train.on_nonfinite == "stop":
                taken.result()
        # What is left of it would be held beside the weights that are kept.
        optimiser.state.clear()


def useful_power(loss: Callable[[int], float], before: float) -> float:
    """Return how far one update should go, as a power of the factor between rates.

    Args:
        loss: of the judged text after an update at the first rate times the factor to this power.
        before: the loss before any update.
    """
    if before == math.inf:
        return 0.0
    tried = best = _lower_while(0, lambda power: loss(power) == math.inf)
    # Upwards past a few that are worse by noise: where a gain has hardly begun, that may be any rate.
    while (
        tried < min(_MOST_STEPS_AWAY, best + _MOST_NOISY)
        and loss(tried + 1) < loss(best) + _NOISE * before
    ):
        tried += 1
        best = min(best, tried, key=loss)
    while best > -_MOST_STEPS_AWAY and loss(best - 1) < loss(best):
        best -= 1
    gain = before - loss(best)
    if gain <= _NOISE * before:
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


def lowest_power(loss: Callable[[int], float]) -> float:
    """Return the lowest of a few rates that ends lowest but for noise, as a power of the factor
    between them, by few branches.

    Args:
        loss: of the judged text after a branch at a rate times the factor to this power.
    """
    losses = {0: loss(0)}
    while True:
        best = min(losses, key=lambda power: (losses[power], power))
        beside = [power for power in (best - 1, best + 1) if power not in losses]
        if not beside or len(losses) == MOST_BRANCHES:
            break
        losses[beside[0]] = loss(beside[0])
    lower, higher = (losses.get(best + way, math.inf) for way in (-1, 1))
    bend = lower - 2 * losses[best] + higher
    if not 0 < bend < math.inf:
        return best
    lowest = best + (lower - higher) / (2 * bend)
    rises_by_noise = math.sqrt(_NOISE * losses[best] / (bend / 2))
    return max(min(losses), lowest - rises_by_noise)


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
    kept = half if torch.equal(half.to(here.dtype), here) else here
    return kept.to("cpu", copy=True)
