"""`train.average`: the weights that a run ends with are a mean over several steps (LAE's average)."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

from pydantic import Field

from scale_cli.methods.recipes import Recipe, Training, Update, local_part
from scale_cli.values import Section, Steps

_SHARE_AVERAGED = 0.1  # default of average.steps, as a share of max_steps


class AverageConfig(Section):
    """The mean of the weights over several steps."""

    kind: Literal["ema", "tail"] = Field(
        description="ema: a moving average; tail: the mean over the last steps"
    )
    steps: Steps | None = Field(
        default=None,
        description="tail: how many; ema: each weighs 1 - 1/steps times the next; null: a tenth of max_steps",
    )


class Average(Recipe):
    """Keeps the mean of what trains, and puts it in place of the weights after the last step.

    `tail` is the mean over the last steps. In `ema` every step weighs 1 - 1/n times the step after
    it, with n = `average.steps`; over the first n steps it is their mean, so that the start has no
    weight. The number of steps in the mean depends on the current step alone.
    """

    key, name = "average", "average"
    field = (
        AverageConfig | None,
        Field(default=None, description="the run ends with a mean over several steps; null: off"),
    )

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._steps = self.train.average.steps or ceil(_SHARE_AVERAGED * self.train.max_steps)
        is_tail = self.train.average.kind == "tail"
        self._first = max(0, self.train.max_steps - self._steps) if is_tail else 0

    def keeps(self, num_steps: int) -> bool:
        return num_steps > self._first

    def after(self, update: Update) -> None:
        import torch
        from torch.optim.swa_utils import get_swa_multi_avg_fn

        num_before = update.step - self._first
        if num_before < 0:
            return
        if self.train.average.kind == "ema":
            num_before = min(num_before, self._steps - 1)

        averages: list[Any] = []
        parameters: list[Any] = []
        with torch.no_grad():
            for parameter in update.parameters:
                state = update.optimiser.state[parameter]
                if self.name not in state:
                    state[self.name] = torch.zeros_like(parameter)
                averages.append(local_part(state[self.name]))
                parameters.append(local_part(parameter))
            get_swa_multi_avg_fn()(averages, parameters, num_before)

            if update.step + 1 == self.train.max_steps:
                for parameter, average in zip(parameters, averages, strict=True):
                    parameter.copy_(average)
