"""Hooks, which run around every update, and recipes: hooks that a key of `train` asks for, with any
method.

`RECIPES` lists the recipes. The config's schema reads it, so this module loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from scale_cli.values import Change

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

    A tensor per parameter that must outlast a step is kept in the optimiser's state under `name`,
    so that it is saved, sharded and resumed like the moments. An optimiser expects moments in any
    state that is not empty, so nothing is put there before the first update.
    """

    name: ClassVar[str] = ""  # key of its tensor in every parameter's state; "": it keeps none

    def keeps(self, num_steps: int) -> bool:
        """Return whether these tensors exist after `num_steps` steps."""
        return False

    def empty(self, parameter: Tensor) -> Tensor:
        """Return a parameter's tensor, to be filled from a checkpoint; it is sharded like the
        parameter.
        """
        import torch

        return torch.zeros_like(parameter)

    def before(self, update: Update) -> None:
        """Run before the update: gradients are summed over processes, unscaled and clipped, and may
        be changed.
        """

    def after(self, update: Update) -> None:
        """Run after the update."""


@dataclass(frozen=True)
class Training:
    """The parts of a training run from which hooks are made."""

    config: Any  # of the run
    model: Any  # the model that trains, on its device or sharded
    wrapped: Any  # the same as it is run
    accelerator: Any  # processes and devices
    batches: Any  # of the whole run


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; trainability is decided by the model's structure,
    at load.
    """
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: all of it if it is not sharded."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


class Recipe(Hook):
    """A hook that a key of `train` asks for."""

    key: ClassVar[str]
    field: ClassVar[tuple[Any, Any]]  # type and field of that key, as for pydantic's `create_model`

    def __init__(self, training: Training) -> None:
        self.train = training.config.train

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) not in (None, False)

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        """Yield what a config that asks for this recipe has that does not go with it, the key
        first.
        """
        yield from ()


class BoundedRows(Recipe):
    """Keeps every row of E' at or below its initial rms, if E' starts as codes (docs/training.md).

    u is divided by rms(x), never by its own rms. So the rows of frequent tokens, which grow most,
    would look larger at every layer. Source: ours.
    """

    key = "embedding_norm"
    field = (
        Annotated[Literal["free", "bounded"], Change.ACCEPTED],
        Field(
            default="free",
            description="rms of each token's row of E' that starts as a code; bounded: at most the initial rms",
        ),
    )

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._codes = [
            parameter
            for name, parameter in trainable_parameters(training.model).items()
            if name.endswith("expansion.embed_tokens.weight")
        ]
        # None: E' started at 0, because the base knows the text.
        self._rms: float | None = training.model.config.start.get("embedding_rms")

    @classmethod
    def is_asked_for(cls, train: Any) -> bool:
        return getattr(train, cls.key) == "bounded"

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        if not config.method.definition.widens:
            yield f"train.embedding_norm: {config.method.variant} has no E' to bound; set it to free"

    def after(self, update: Update) -> None:
        import torch

        if self._rms is None:
            return
        for parameter in self._codes:
            rows = local_part(parameter.detach())  # a sharded tensor is split by rows
            rms = rows.float().pow(2).mean(dim=-1, keepdim=True).sqrt()
            shares = (self._rms / rms).clamp(max=1.0)
            rows.mul_(torch.where(update.finite, shares, 1.0))


# Outermost first: a hook's `before` runs before those of inner hooks, its `after` after theirs.
# A method's own hooks are the innermost.
RECIPES: list[type[Recipe]] = [BoundedRows]


def recipes_of(train: Any) -> list[type[Recipe]]:
    return [recipe for recipe in RECIPES if recipe.is_asked_for(train)]


def make_hooks(training: Training) -> list[Hook]:
    """Return the hooks of a run, outermost first: its recipes, then the method's."""
    method = training.config.method
    recipes = [recipe(training) for recipe in recipes_of(training.config.train)]
    return [*recipes, *method.definition.hooks(method.settings, training)]
