"""What each method kept of Task 0 and learned of Task 1 during training, and the report on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.load import dump_config
from scale_cli.methods import METHODS
from scale_cli.report import COLOURS, MARKS, Table, percent
from scale_cli.storage.atomic import write_json, write_text
from scripts.research.biography.config import BiographyConfig

# Bars for the posterior rule: the share of Task 0 that it keeps, and its share of what full fine-tuning learns.
KEPT_BAR, LEARNED_BAR = 0.95, 0.90


@dataclass(frozen=True)
class MethodResult:
    """One method's run of Task 1, as its file stores it."""

    name: str  # of the method in the config
    variant: str  # `method.variant`
    settings: dict[
        str, Any
    ]  # the method's own settings; `settings.json` beside it has what else decides the result
    trainable_parameters: int  # that Task 1 trained
    training_s: float  # of the steps, without measurements
    steps: list[int]  # steps at which accuracy was measured, 0 first
    task_0: dict[
        str, list[float]
    ]  # accuracy on Task 0 at each of them, by served head (`results.HEADS_AND_RULES`)
    task_1: dict[str, list[float]]  # the same on Task 1


@dataclass(frozen=True)
class Line:
    """The results of one served model: a line of the figure and a row of the table."""

    label: str  # of the figure
    variant: str  # decides colour and marker
    result: MethodResult  # that it shows
    served: str  # one of `results.HEADS_AND_RULES`

    @property
    def task_0(self) -> list[float]:
        return self.result.task_0[self.served]

    @property
    def task_1(self) -> list[float]:
        return self.result.task_1[self.served]

    @property
    def kept(self) -> float | None:
        """The lowest share of the first Task 0 accuracy at any step; None if that accuracy was 0."""
        return min(self.task_0) / self.task_0[0] if self.task_0[0] else None


def served_lines(results: list[MethodResult]) -> list[Line]:
    """Return the lines of every method: its trained head, or for `route` both rules, ours last."""
    lines = []
    for result in results:
        method = METHODS[result.variant]
        if method.widens and method.head == "routed":
            lines += [
                Line(f"{result.name} ({rule})", result.variant, result, rule)
                for rule in ("cosine", "posterior")
            ]
        else:
            lines.append(Line(result.name, result.variant, result, "trained"))
    return lines


def verdicts(lines: list[Line]) -> list[str]:
    """Return a sentence for each posterior line: what it kept, what it learned beside `full`, and if both suffice."""
    full = {line.variant: line for line in reversed(lines)}.get("full")
    sentences = []
    for line in (line for line in lines if line.served == "posterior"):
        kept = line.kept
        held = kept is not None and kept >= KEPT_BAR
        bar = f"(bar {percent(KEPT_BAR, 0)}: {_met(held)})"
        words = [
            f"{line.label} never held less than {'nothing' if kept is None else percent(kept)} of Task 0 {bar}"
        ]
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


def terminal_lines(results: list[MethodResult]) -> list[str]:
    """Return an aligned table of the served models, and the verdicts."""
    lines = served_lines(results)
    rows = [
        [line.label, *(percent(task[at]) for task in (line.task_0, line.task_1) for at in (0, -1))]
        for line in lines
    ]
    titles = ["after Task 1", "Task 0: start", "end", "Task 1: start", "end"]
    return [*Table(titles, rows, "lrrrr").lines(), *verdicts(lines)]


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
        if not METHODS[result.variant].widens
    ]
    titles = [
        "served",
        "trainable parameters",
        "Task 0, start",
        "Task 0, lowest",
        "Task 0, end",
        "Task 1, end",
        "s",
    ]
    parts = [
        _HEAD.format(people=config.people, task=config.task_1, seed=config.seed),
        "".join(f"- {sentence}\n" for sentence in verdicts(lines)),
        Table(titles, served, "lrrrrrr").markdown(),
        _BESIDE,
        Table(["trained model", "Task 0, end", "Task 1, end"], beside, "lrr").markdown(),
    ]
    write_text(folder / "report.md", "\n".join(parts) + "\n")
    _draw(folder, results)


_HEAD = """\
# Biography benchmark

{people.pretraining:,} synthetic people were pre-trained ({people.biographies_each} biographies each); Task 0 asks six \
questions on each of {people.task_0:,} of them, Task 1 on each of {people.task_1:,} people never seen. Every method \
learns Task 1 from the same base, on the same {task.max_steps:,} batches of {task.batch_size} questions in the same \
order, one seed ({seed}). Learning rates are the config's; they were not tuned one against another.

Hard first-token accuracy: the share of questions after which the likeliest token is the first of the answer. Source: \
SCALE, arXiv 2511.03270.

![Accuracy on Task 0 and Task 1 against training steps](accuracy.svg)
"""
_BESIDE = """
What the methods that widen nothing would answer if they were served beside the untouched base, mixed by the same \
posterior rule (two models, two forwards):
"""


def _draw(folder: Path, results: list[MethodResult]) -> None:
    """Plot accuracy against steps, with a panel for each task."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "biography", "font.size": 9}):
        figure = Figure(figsize=(10.4, 4.2), layout="constrained")
        kept, learned = figure.subplots(1, 2, sharey=True)
        for axes, task, title in (
            (kept, "task_0", "Task 0, kept"),
            (learned, "task_1", "Task 1, learned"),
        ):
            for line in served_lines(results):
                axes.plot(
                    line.result.steps,
                    [100 * share for share in getattr(line, task)],
                    label=line.label,
                    color=COLOURS[line.variant],
                    marker=MARKS[line.variant][0],
                    markersize=7,
                    markevery=max(1, len(line.result.steps) // 8),
                    linewidth=2.4 if line.served == "posterior" else 1.6,
                    linestyle="--" if line.served == "cosine" else "-",
                )
            axes.set(xlabel="training steps on Task 1", ylim=(-3, 105))
            axes.set_title(title, loc="left", weight="bold")
            axes.grid(axis="y", alpha=0.3)
        kept.set_ylabel("hard first-token accuracy, %")
        figure.legend(*kept.get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.savefig(folder / "accuracy.svg", metadata={"Date": None})
        figure.savefig(folder / "accuracy.png", dpi=160)
