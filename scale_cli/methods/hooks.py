"""Hooks: what is done around an optimiser's update, whichever method or recipe asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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
        """Everything that trains."""
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

    def exchange(self, optimiser: Any) -> bool:
        """Put other weights in the parameters' place, which `final/` is to hold, or put them back.

        Returns:
            Whether there are such.
        """
        return False


@contextmanager
def of_final(hooks: Sequence[Hook], optimiser: Any) -> Iterator[bool]:
    """Let the parameters be for a while what `final/` would hold; yields whether that is anything else."""
    with ExitStack() as stack:
        changed = False
        for hook in hooks:
            if hook.exchange(optimiser):
                stack.callback(hook.exchange, optimiser)
                changed = True
        yield changed


@dataclass(frozen=True)
class Training:
    """What hooks are made of."""

    model: Any  # what trains, on its device or sharded
    train: Any  # that section of the config
    start: Mapping[str, Tensor]  # a copy of what trains, by name, at the method's start; only where `needs_start`
    accelerator: Any
    probe: Callable[[int], Sequence[Any]]  # so many windows of every source of known text
    loss: Callable[[Any], Tensor]  # of a window, in nats per token, as it is trained


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: all of it where it is not sharded."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
