"""What a method kept of Task 0 and learned of Task 1 as training went on, and the report of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.biography import BiographyConfig
from scale_cli.config.load import dump_config
from scale_cli.report.figures import LIGHT, MARKS, panel, png, set_size, svg_alone
from scale_cli.report.numbers import percent
from scale_cli.report.pages import markdown
from scale_cli.report.tables import Table
from scale_cli.storage.atomic import write_json, write_text

# What is asked of the posterior rule: to keep so much of Task 0, and to learn so much of what full fine-tuning learns.
KEPT_BAR, LEARNED_BAR = 0.95, 0.90
_WIDTH = 750.0


@dataclass(frozen=True)
class MethodResult:
    """One method's run of Task 1, as the method's file holds it."""

    name: str  # of the method in the config
    variant: str  # `method.variant`
    settings: dict[str, Any]  # the method's own settings; `settings.json` beside has what else decides the result
    trainable_parameters: int  # that Task 1 moved
    training_s: float  # of the steps, measurements excluded
    steps: list[int]  # at which accuracy was measured, 0 first
    task_0: dict[str, list[float]]  # accuracy on Task 0 at each of them, by what is served (`results.HEADS`)
    task_1: dict[str, list[float]]  # the same on Task 1


@dataclass(frozen=True)
class Line:
    """What one served model did: a line of the figure and a row of the table."""

    label: str  # of the figure
    variant: str  # decides colour and marker
    result: MethodResult  # whose it is
    served: str  # one of `results.HEADS`

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
        words = [f"{line.label} never held less than {'nothing' if kept is None else percent(kept)} of Task 0 {bar}"]
        if full is not None and full.task_1[-1]:
            share = line.task_1[-1] / full.task_1[-1]
            words.append(
                f"it learned {percent(share)} of what {full.label} learned of Task 1 "
                f"(bar {percent(LEARNED_BAR, 0)}: {_met(share >= LEARNED_BAR)})"
            )
        sentences.append("; ".join(words) + ".")
    return sentences


def _met(met: bool) -> str:
    return "met" if met else "missed"


def write_report(folder: Path, config: BiographyConfig, results: list[MethodResult]) -> None:
    """Write report.md, report.json, the resolved config, and the figure as .svg and .png."""
    write_json(folder / "report.json", {"methods": [asdict(result) for result in results]})
    write_text(folder / "biography.yaml", dump_config(config))
    lines = served_lines(results)
    served = [
        [
            line.label,
            f"{line.result.trainable_parameters:,}",
            *map(percent, (line.task_0[0], min(line.task_0), line.task_0[-1], line.task_1[-1])),
            f"{line.result.training_s:,.0f}",
        ]
        for line in lines
    ]
    beside = [
        [result.name, *(percent(task["posterior"][-1]) for task in (result.task_0, result.task_1))]
        for result in results
        if result.variant not in ("preserve", "adapt", "route")
    ]
    titles = ["served", "trainable parameters", "Task 0, start", "Task 0, lowest", "Task 0, end", "Task 1, end", "s"]
    page = markdown(
        "biography.md.j2",
        people=config.people,
        task=config.task_1,
        seed=config.seed,
        verdicts=verdicts(lines),
        served=Table(titles, served, "lrrrrrr").markdown(),
        beside=Table(["trained model", "Task 0, end", "Task 1, end"], beside, "lrr").markdown(),
    )
    write_text(folder / "report.md", page)
    title = "Accuracy on Task 0 and Task 1 against training steps"
    write_text(folder / "accuracy.svg", svg_alone(lambda figure, _: _draw(figure, results), _WIDTH, title))
    png(lambda figure: _draw(figure, results), folder / "accuracy.png")


def _draw(figure: Any, results: list[MethodResult]) -> None:
    set_size(figure, _WIDTH, 302)
    for left, task, title in ((60.0, "task_0", "Task 0, kept"), (330.0, "task_1", "Task 1, learned")):
        axes = panel(figure, left, 34, left + 246, 254)
        for line in served_lines(results):
            axes.plot(
                line.result.steps,
                [100 * share for share in getattr(line, task)],
                label=line.label,
                color=LIGHT[line.variant],
                marker=MARKS[line.variant][0],
                markersize=7,
                markevery=max(1, len(line.result.steps) // 8),
                linewidth=2.4 if line.served == "posterior" else 1.6,
                linestyle="--" if line.served == "cosine" else "-",
            )
        axes.set(xlabel="training steps on Task 1", ylim=(-3, 105))
        axes.set_title(title)
        axes.grid(axis="x", visible=False)
    figure.axes[0].set_ylabel("hard first-token accuracy, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=11, loc="center right")
