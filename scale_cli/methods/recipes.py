"""Hooks: what is done around an update, whichever method asks for it; and recipes, hooks that go with several methods.

The recipes are lookahead, averages, decay to the base and bounds of E'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.values import Section, Steps

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Update:
    """An optimiser's update, about to be made or just made."""

    step: int  # 0 is the first
    optimiser: Any  # its groups have the learning rates of the step
    finite: Tensor  # whether the step's figures are; where not, nothing may change

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]


class Hook:
    """What is done before and after every update.

    A tensor of every parameter that has to outlast a step is kept in the optimiser's state under `name`, and so is
    saved, sharded and resumed as the moments are. To an optimiser a parameter of any state is one that has its moments:
    nothing is put there before the first update.
    """

    name: ClassVar[str] = ""  # of a tensor of every parameter; "": it keeps none

    def keeps(self, train: Any, num_steps: int) -> bool:
        """Return whether those tensors are there after some steps of a run of such settings (`train`)."""
        return False

    def empty(self, parameter: Tensor) -> Tensor:
        """Return the tensor of a parameter, to be filled from a checkpoint; sharded as the parameter is."""
        import torch

        return torch.zeros_like(parameter)

    def before(self, update: Update) -> None:
        """Do what comes before the update."""

    def after(self, update: Update) -> None:
        """Do what comes after it."""

    def exchange(self, optimiser: Any) -> None:
        """Put other weights in the parameters' place, which `final/` is to hold, or put them back."""


@contextmanager
def of_final(hooks: Sequence[Hook], optimiser: Any) -> Iterator[None]:
    """Let the parameters be for a while what `final/` would hold."""
    with ExitStack() as stack:
        for hook in hooks:
            hook.exchange(optimiser)
            stack.callback(hook.exchange, optimiser)
        yield


@dataclass(frozen=True)
class Training:
    """What hooks are made of."""

    model: Any  # what trains, on its device or sharded
    train: Any  # that section of the config
    start: Mapping[str, Tensor]  # a copy of what trains, by name, at the method's start; only where `needs_start`
    accelerator: Any
    probe: Callable[[int], Sequence[Any]]  # so many windows of every source of known text
    loss: Callable[[Any], Tensor]  # of a window, in nats per token, as it is trained


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; trainability is decided by the model's structure, at load."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: all of it where it is not sharded."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


class Recipe(Hook):
    """A hook that settings of `train` ask for."""

    key: ClassVar[str]  # of `train`, that asks for it
    copies_kept: ClassVar[int] = 0  # of what trains, beside the moments
    copies_of_start: ClassVar[int] = 0  # of what trains, never written

    def __init__(self, training: Training) -> None:
        self.train = training.train

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) not in (None, False)


class AverageConfig(Section):
    """What `final/` holds instead of the last step's weights: their mean over several steps."""

    kind: Literal["ema", "tail"] = Field(description="ema: a moving average; tail: the mean over the last steps")
    steps: Steps | None = Field(
        default=None,
        description="of tail: how many; of ema: each weighs 1 - 1/steps of the next; null: a tenth of max_steps",
    )


class Average(Recipe):
    """The mean of what trains over steps, which is what `final/` holds.

    How many steps are in it follows from the step alone; with the first of them it begins anew, whatever was there.
    """

    key, name, copies_kept = "average", "average", 1

    def keeps(self, train: Any, num_steps: int) -> bool:
        begins = first_averaged(train)
        return begins is not None and num_steps > begins

    def after(self, update: Update) -> None:
        """Take what a step has made of the parameters into their average.

        Of `tail` the mean over the last steps. Of `ema` every step weighs 1 - 1/n of the one after it, n being
        `average.steps`; over the first n steps it is their mean, so that the start weighs nothing.
        """
        import torch
        from torch.optim.swa_utils import get_swa_multi_avg_fn

        begins = first_averaged(self.train)
        if begins is None or update.step < begins:
            return
        num_before = update.step - begins
        if self.train.average.kind == "ema":
            num_before = min(num_before, self.train.averaged_steps - 1)
        averages, parameters = [], []
        with torch.no_grad():
            for parameter in update.parameters:
                state = update.optimiser.state[parameter]
                if self.name not in state:
                    state[self.name] = torch.zeros_like(parameter)
                averages.append(local_part(state[self.name]))
                parameters.append(local_part(parameter))
            get_swa_multi_avg_fn()(averages, parameters, num_before)

    def exchange(self, optimiser: Any) -> None:
        import torch

        kept = {parameter: state[self.name] for parameter, state in optimiser.state.items() if self.name in state}
        with torch.no_grad():
            for parameter, average in kept.items():
                # In place: a sharded model knows its parts by where they lie.
                one, other = local_part(parameter), local_part(average)
                before = one.clone()
                one.copy_(other)
                other.copy_(before)


def first_averaged(train: Any) -> int | None:
    """Return the first step (0 is the first of all) whose outcome is in the average; None where none is kept."""
    if train.average is None:
        return None
    return max(0, train.max_steps - train.averaged_steps) if train.average.kind == "tail" else 0


class LookaheadConfig(Section):
    """Every so many steps what trains goes back, but for a share of the way it has come: with replay, MER."""

    every_steps: Steps = Field(description="from one to the next")
    share: float = Field(default=0.5, gt=0.0, le=1.0, description="of the way since the last one that is kept")


class Lookahead(Recipe):
    """Every k steps theta becomes slow + share (theta - slow), slow being what that made of it k steps before.

    With replay that is MER, replay and Reptile, as continual pre-training has it (https://arxiv.org/abs/2508.01908).
    The optimiser's moments go on as they are. The slow weights begin anew with every k steps.

    Source: Zhang et al. 2019, https://arxiv.org/abs/1907.08610
    """

    key, name, copies_kept = "lookahead", "slow", 1

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._begun: list[Tensor] = []

    def keeps(self, train: Any, num_steps: int) -> bool:
        return train.lookahead is not None and num_steps % train.lookahead.every_steps > 0

    def before(self, update: Update) -> None:
        if not self.keeps(self.train, update.step):
            self._begun = [parameter.detach().clone() for parameter in update.parameters]

    def after(self, update: Update) -> None:
        state, parameters = update.optimiser.state, update.parameters
        for parameter, slow in zip(parameters, self._begun, strict=False):
            state[parameter][self.name] = slow
        self._begun = []
        if not self.keeps(self.train, update.step + 1):
            for parameter in parameters:
                slow, fast = (local_part(t.detach()) for t in (state[parameter].pop(self.name), parameter))
                fast.copy_(slow.lerp(fast, self.train.lookahead.share))


class BoundedRows(Recipe):
    """No row of E' grows beyond the rms that it started with (docs/training.md).

    u is divided by rms(x) and never by its own, so that the rows of frequent tokens, which grow most, would be seen
    larger at every layer. Source: ours.
    """

    key = "embedding_norm"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        trained = trainable_parameters(training.model)
        self._codes = [p for name, p in trained.items() if name.endswith("expansion.embed_tokens.weight")]
        rms: float | None = getattr(training.model.config, "expansion_embedding_rms", None)
        if rms is None:
            raise ConfigError("train.embedding_norm: E' of this run began without a size; only free goes on with it")
        self._rms = rms

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) == "bounded"

    def after(self, update: Update) -> None:
        import torch

        for parameter in self._codes:
            rows = local_part(parameter.detach())  # a sharded tensor is split by rows
            shares = (self._rms / rows.float().pow(2).mean(dim=-1, keepdim=True).sqrt()).clamp(max=1.0)
            rows.mul_(torch.where(update.finite, shares, 1.0))


class DecayToBase(Recipe):
    """Each step begins with theta - lr wd (theta - theta_0), wd being `train.weight_decay`: decoupled, as AdamW's is.

    Source: L2-SP, Li et al. 2018, https://arxiv.org/abs/1802.01483
    """

    key, copies_of_start = "decay_to_base", 1

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        trained = trainable_parameters(training.model)
        self._start = {p: training.start[name].to(p.device) for name, p in trained.items()}

    def before(self, update: Update) -> None:
        for group in update.optimiser.param_groups:
            share = update.finite * (group["lr"] * self.train.weight_decay)
            for parameter in group["params"]:
                parameter.detach().lerp_(self._start[parameter], share)


# Outermost first: a hook acts before those within it, and after them. What a method does lies between.
_AROUND: tuple[type[Recipe], ...] = (Average, Lookahead, BoundedRows)
_WITHIN: tuple[type[Recipe], ...] = (DecayToBase,)  # which goes by the rates that a method sets


def recipes_of(train: Any) -> list[type[Recipe]]:
    return [recipe for recipe in (*_AROUND, *_WITHIN) if recipe.is_asked_for(train)]


def copy_start(model: Any, train: Any) -> dict[str, Tensor]:
    """Return a copy of what trains, by name, of a model at its start; nothing where no recipe needs it."""
    if not any(recipe.copies_of_start for recipe in recipes_of(train)):
        return {}
    return {name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()}


def make_hooks(training: Training, of_method: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of a run: its recipes, and around the innermost those of its method."""
    asked = recipes_of(training.train)
    around, within = ([recipe(training) for recipe in of if recipe in asked] for of in (_AROUND, _WITHIN))
    return [*around, *of_method, *within]
