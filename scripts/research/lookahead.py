"""`train.lookahead`: every few steps, what trains goes back part of its way; with replay this is MER."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.methods.recipes import Recipe, Training, Update, local_part
from scale_cli.values import Section, Steps

if TYPE_CHECKING:
    from torch import Tensor


class LookaheadConfig(Section):
    """Every few steps, what trains goes back and keeps only a share of the way."""

    every_steps: Steps = Field(description="steps between two returns")
    share: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="share of the change since the last return that is kept",
    )


class Lookahead(Recipe):
    """Every k steps theta becomes slow + share (theta - slow), where slow is the result of k steps before.

    With replay this is MER (replay and Reptile) as in continual pre-training (arXiv 2508.01908).
    The optimiser's moments do not change. Source: Zhang et al. 2019, arXiv 1907.08610.
    """

    key, name = "lookahead", "slow"
    field = (
        LookaheadConfig | None,
        Field(
            default=None,
            description="every few steps, the trained weights go back part of their way; null: never",
        ),
    )

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._begun: list[Tensor] = []

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        every_steps, max_steps = config.train.lookahead.every_steps, config.train.max_steps
        if every_steps > max_steps:
            yield f"train.lookahead.every_steps: {every_steps:,} is beyond max_steps {max_steps:,}"

    def keeps(self, num_steps: int) -> bool:
        every_steps: int = self.train.lookahead.every_steps
        return num_steps % every_steps > 0

    def before(self, update: Update) -> None:
        if not self.keeps(update.step):
            self._begun = [parameter.detach().clone() for parameter in update.parameters]

    def after(self, update: Update) -> None:
        state, parameters = update.optimiser.state, update.parameters
        for parameter, slow in zip(parameters, self._begun, strict=False):
            state[parameter][self.name] = slow
        self._begun = []
        if self.keeps(update.step + 1):
            return
        for parameter in parameters:
            slow = local_part(state[parameter].pop(self.name))
            fast = local_part(parameter.detach())
            fast.copy_(slow.lerp(fast, self.train.lookahead.share))
