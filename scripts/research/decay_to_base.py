"""`train.decay_to_base`: every step pulls what trains towards what it was at the start (L2-SP)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.methods.recipes import Recipe, Training, Update, local_part

if TYPE_CHECKING:
    from torch import Tensor


class DecayToBase(Recipe):
    """Each step starts from theta - lr d (theta - theta_0), with d = `train.decay_to_base`: decoupled, like AdamW's.

    It acts on embeddings and gains too. Source: L2-SP, Li et al. 2018, arXiv 1802.01483.
    """

    key, name = "decay_to_base", "start"
    field = (
        float | None,
        Field(
            default=None,
            gt=0.0,
            le=100.0,
            description="pull towards the weights of the start, instead of weight_decay; null: off",
        ),
    )

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._begun: dict[Any, Tensor] = {}

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        if not config.method.trains_base_weights:
            yield f"train.decay_to_base: {config.method.variant} trains none of the base's weights"
        if config.train.init_from is not None:
            yield "train.decay_to_base: a run with train.init_from does not begin at its base"
        if config.train.weight_decay:
            yield "train.decay_to_base: replaces weight_decay; set train.weight_decay: 0"

    def keeps(self, num_steps: int) -> bool:
        return num_steps > 0

    def before(self, update: Update) -> None:
        if update.step == 0:  # theta is theta_0, so nothing pulls
            self._begun = {p: p.detach().clone() for p in update.parameters}
            return
        for group in update.optimiser.param_groups:
            share = update.finite * (group["lr"] * self.train.decay_to_base)
            for parameter in group["params"]:
                start = local_part(update.optimiser.state[parameter][self.name])
                local_part(parameter.detach()).lerp_(start, share)

    def after(self, update: Update) -> None:
        for parameter, start in self._begun.items():
            update.optimiser.state[parameter][self.name] = start
        self._begun = {}
