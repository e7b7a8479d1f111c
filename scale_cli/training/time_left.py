"""What is left of a run in time, once its steps are measured."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.report import duration

_WORTH_SAYING = 1.5  # by which the steps are slower or faster than planned


@dataclass(frozen=True)
class PlannedTime:
    """The seconds that a user was told at the start, of what was still to come."""

    training_s: float
    evaluation_s: float  # on the way, and at the end
    export_s: float

    def corrected(
        self, step_s: float, num_steps: int, steps_left: int, evaluated_s: float
    ) -> str | None:
        """Return a line on what is left; None if steps take about what was planned.

        Other work slows evaluations and exports down as it slows the steps down.

        Args:
            step_s: measured, of one step.
            num_steps: that were still to come.
            steps_left: of those.
            evaluated_s: spent on evaluations since then.
        """
        slower = step_s * num_steps / self.training_s
        if 1 / _WORTH_SAYING <= slower <= _WORTH_SAYING:
            return None
        training_s = steps_left * step_s
        evaluation_s = max(0.0, slower * self.evaluation_s - evaluated_s)
        export_s = slower * self.export_s
        return (
            f"time           about {duration(training_s + evaluation_s + export_s)} left: "
            f"{duration(training_s)} of training, {duration(evaluation_s)} of evaluation, "
            f"{duration(export_s)} of export; a step takes {step_s:.3g} s, "
            f"{slower:.2g} times what was planned"
        )
