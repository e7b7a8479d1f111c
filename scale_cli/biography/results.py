"""What a method kept of Task 0 and learned of Task 1 as training went on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scale_cli.report.numbers import percent

# What is asked of the posterior rule: to keep so much of Task 0, and to learn so much of what full fine-tuning learns.
KEPT_BAR, LEARNED_BAR = 0.95, 0.90


@dataclass(frozen=True)
class MethodResult:
    """One method's run of Task 1."""

    name: str  # of the method in the config
    variant: str  # `method.variant`
    settings: dict[str, Any]  # the method's own settings, and what else decides the result
    trainable_parameters: int  # that Task 1 moved
    training_s: float  # of the steps, measurements excluded
    steps: list[int]  # at which accuracy was measured, 0 first
    task_0: dict[str, list[float]]  # accuracy on Task 0 at each of them, by what is served (`accuracy.SERVED`)
    task_1: dict[str, list[float]]  # the same on Task 1

    def to_json(self) -> dict[str, Any]:
        """Return what the method's file holds."""
        return asdict(self)


@dataclass(frozen=True)
class Line:
    """What one served model did: a line of the figure and a row of the table."""

    label: str  # of the figure
    variant: str  # decides colour and marker
    result: MethodResult  # whose it is
    served: str  # one of `accuracy.SERVED`

    @property
    def task_0(self) -> list[float]:
        """Accuracy on Task 0 at each measured step."""
        return self.result.task_0[self.served]

    @property
    def task_1(self) -> list[float]:
        """Accuracy on Task 1 at each measured step."""
        return self.result.task_1[self.served]

    @property
    def kept(self) -> float | None:
        """The least share of the first Task 0 accuracy that was held at any step; None where there was none to keep."""
        return min(self.task_0) / self.task_0[0] if self.task_0[0] else None


def served_lines(results: list[MethodResult]) -> list[Line]:
    """Return what every method serves: its trained head, and for `route` both rules, ours last."""
    lines = []
    for result in results:
        if result.variant == "route":
            lines += [Line(f"{result.name} ({rule})", "route", result, rule) for rule in ("cosine", "posterior")]
        else:
            lines.append(Line(result.name, result.variant, result, "adapted"))
    return lines


def verdicts(lines: list[Line]) -> list[str]:
    """Return a sentence for each posterior line: what it kept, what it learned beside `full`, and if it is enough."""
    full = next((line for line in lines if line.variant == "full"), None)
    sentences = []
    for line in (line for line in lines if line.served == "posterior"):
        kept = line.kept
        held = kept is not None and kept >= KEPT_BAR
        bar = f"(bar {percent(KEPT_BAR, 0)}: {_met(held)})"
        words = [f"{line.label} never held less than {_percent(kept)} of Task 0 {bar}"]
        if full is not None and full.task_1[-1]:
            share = line.task_1[-1] / full.task_1[-1]
            words.append(
                f"it learned {_percent(share)} of what {full.label} learned of Task 1 "
                f"(bar {percent(LEARNED_BAR, 0)}: {_met(share >= LEARNED_BAR)})"
            )
        sentences.append("; ".join(words) + ".")
    return sentences


def _percent(share: float | None) -> str:
    return "nothing" if share is None else percent(share)


def _met(met: bool) -> str:
    return "met" if met else "missed"
