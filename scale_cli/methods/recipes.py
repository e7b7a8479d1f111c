"""Hooks, which run around every update, and recipes: hooks that a config can ask for with several methods.

The recipes are lookahead, averages, decay to the base and bounds on E'.
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
    finite: Tensor  # whether the step's figures are finite; if not, nothing may change

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]


class Hook:
    """Runs before and after every update.

    A tensor per parameter that must outlast a step is kept in the optimiser's state under `name`, so that it is saved,
    sharded and resumed like the moments. An optimiser expects moments in any state that is not empty, so nothing is put
    there before the first update.
    """

    name: ClassVar[str] = ""  # key of its tensor in every parameter's state; "": it keeps none

    def keeps(self, train: Any, num_steps: int) -> bool:
        """Return whether these tensors exist after `num_steps` steps of a run with the settings `train`."""
        return False

    def empty(self, parameter: Tensor) -> Tensor:
        """Return a parameter's tensor, to be filled from a checkpoint; it is sharded like the parameter."""
        import torch

        return torch.zeros_like(parameter)

    def before(self, update: Update) -> None:
        """Run before the update: gradients are summed over processes, unscaled and clipped, and may be changed."""

    def after(self, update: Update) -> None:
        """Run after the update."""

    def exchange(self, optimiser: Any) -> None:
        """Swap the parameters with the weights that `final/` is to hold; a second call swaps them back."""


@contextmanager
def of_final(hooks: Sequence[Hook], optimiser: Any) -> Iterator[None]:
    """Within the body, the parameters are what `final/` would hold."""
    with ExitStack() as stack:
        for hook in hooks:
            hook.exchange(optimiser)
            stack.callback(hook.exchange, optimiser)
        yield


@dataclass(frozen=True)
class Training:
    """The parts of a training run from which hooks are made."""

    model: Any  # the model that trains, on its device or sharded
    train: Any  # that section of the config
    start: Mapping[
        str, Tensor
    ]  # initial values of what trains, by name; empty if no recipe has `copies_of_start`
    accelerator: Any
    probe: Callable[[int], Sequence[Any]]  # returns so many windows of every source of known text
    loss: Callable[[Any], Tensor]  # the training loss of a window, in nats per token


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; trainability is decided by the model's structure, at load."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: all of it if it is not sharded."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


class Recipe(Hook):
    """A hook that settings of `train` ask for."""

    key: ClassVar[str]  # the key of `train` that asks for it
    copies_kept: ClassVar[int] = 0  # copies of what trains that it keeps beside the moments
    copies_of_start: ClassVar[int] = (
        0  # copies of the initial values of what trains; never written to disk
    )
    is_sharded: ClassVar[bool] = (
        True  # goes with every `train.sharding`; its tensors are then this process's parts
    )

    def __init__(self, training: Training) -> None:
        self.train = training.train

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) not in (None, False)


class AverageConfig(Section):
    """What `final/` holds instead of the last step's weights: their mean over several steps."""

    kind: Literal["ema", "tail"] = Field(
        description="ema: a moving average; tail: the mean over the last steps"
    )
    steps: Steps | None = Field(
        default=None,
        description="tail: how many; ema: each weighs 1 - 1/steps times the next; null: a tenth of max_steps",
    )


class Average(Recipe):
    """The mean, over several steps, of what trains; `final/` holds it.

    The number of steps in it depends on the current step alone; the first of them replaces whatever was there.
    """

    key, name, copies_kept = "average", "average", 1

    def keeps(self, train: Any, num_steps: int) -> bool:
        begins = first_averaged(train)
        return begins is not None and num_steps > begins

    def after(self, update: Update) -> None:
        """Add the parameters after a step to their average.

        `tail`: the mean over the last steps. `ema`: every step weighs 1 - 1/n times the step after it, with n =
        `average.steps`; over the first n steps it is their mean, so that the start has no weight.
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

        kept = {
            parameter: state[self.name]
            for parameter, state in optimiser.state.items()
            if self.name in state
        }
        with torch.no_grad():
            for parameter, average in kept.items():
                # In place: a sharded model refers to its parts by address.
                one, other = local_part(parameter), local_part(average)
                before = one.clone()
                one.copy_(other)
                other.copy_(before)


def first_averaged(train: Any) -> int | None:
    """Return the first step, counted from 0, whose result is in the average; None if no average is kept."""
    if train.average is None:
        return None
    return max(0, train.max_steps - train.averaged_steps) if train.average.kind == "tail" else 0


class LookaheadConfig(Section):
    """Every few steps, what trains goes back and keeps only a share of the way; with replay, this is MER."""

    every_steps: Steps = Field(description="steps between two returns")
    share: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="share of the change since the last return that is kept",
    )


class Lookahead(Recipe):
    """Every k steps theta becomes slow + share (theta - slow), where slow is the result of k steps before.

    With replay this is MER (replay and Reptile) as in continual pre-training (https://arxiv.org/abs/2508.01908). The
    optimiser's moments do not change. The slow weights are set anew every k steps.

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
                slow, fast = (
                    local_part(t.detach()) for t in (state[parameter].pop(self.name), parameter)
                )
                fast.copy_(slow.lerp(fast, self.train.lookahead.share))


class BoundedRows(Recipe):
    """Keeps every row of E' at or below its initial rms (docs/training.md).

    u is divided by rms(x), never by its own rms. So the rows of frequent tokens, which grow most, would look larger at
    every layer. Source: ours.
    """

    key = "embedding_norm"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        trained = trainable_parameters(training.model)
        self._codes = [
            p for name, p in trained.items() if name.endswith("expansion.embed_tokens.weight")
        ]
        rms: float | None = getattr(training.model.config, "expansion_embedding_rms", None)
        if rms is None:
            raise ConfigError(
                "train.embedding_norm: this run started E' without embedding_scale, so its rows have no bound; "
                "set train.embedding_norm=free"
            )
        self._rms = rms

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) == "bounded"

    def after(self, update: Update) -> None:
        import torch

        for parameter in self._codes:
            rows = local_part(parameter.detach())  # a sharded tensor is split by rows
            shares = (self._rms / rows.float().pow(2).mean(dim=-1, keepdim=True).sqrt()).clamp(
                max=1.0
            )
            rows.mul_(torch.where(update.finite, shares, 1.0))


class DecayToBase(Recipe):
    """Each step starts from theta - lr wd (theta - theta_0), with wd = `train.weight_decay`: decoupled, like AdamW's.

    Source: L2-SP, Li et al. 2018, https://arxiv.org/abs/1802.01483
    """

    key, copies_of_start, is_sharded = "decay_to_base", 1, False

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        trained = trainable_parameters(training.model)
        self._start = {p: training.start[name].to(p.device) for name, p in trained.items()}

    def before(self, update: Update) -> None:
        for group in update.optimiser.param_groups:
            share = update.finite * (group["lr"] * self.train.weight_decay)
            for parameter in group["params"]:
                parameter.detach().lerp_(self._start[parameter], share)


# Outermost first: a hook's `before` runs before those of inner hooks, its `after` after theirs. The method's hooks run
# between these two groups.
_AROUND: tuple[type[Recipe], ...] = (Average, Lookahead, BoundedRows)
_WITHIN: tuple[type[Recipe], ...] = (
    DecayToBase,
)  # innermost, as it uses the rates that a method sets


def recipes_of(train: Any) -> list[type[Recipe]]:
    return [recipe for recipe in (*_AROUND, *_WITHIN) if recipe.is_asked_for(train)]


def copy_start(model: Any, train: Any) -> dict[str, Tensor]:
    """Return copies of a model's trainable parameters at its start, by name; empty if no recipe needs them."""
    if not any(recipe.copies_of_start for recipe in recipes_of(train)):
        return {}
    return {
        name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()
    }


def make_hooks(training: Training, of_method: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of a run, outermost first: its recipes, with the method's hooks outside the innermost ones."""
    asked = recipes_of(training.train)
    around, within = (
        [recipe(training) for recipe in of if recipe in asked] for of in (_AROUND, _WITHIN)
    )
    return [*around, *of_method, *within]
