"""The report of a biography benchmark: the paper's figure, a table, and whether the bars were met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scale_cli.biography.results import MethodResult, served_lines, verdicts
from scale_cli.config.biography import BiographyConfig
from scale_cli.config.load import dump_config
from scale_cli.report.figures import LIGHT, MARKS, panel, png, set_size, svg_alone
from scale_cli.report.numbers import percent
from scale_cli.report.pages import markdown
from scale_cli.report.tables import Table
from scale_cli.storage.atomic import write_json, write_text

_WIDTH = 750.0


def write_report(folder: Path, config: BiographyConfig, results: list[MethodResult]) -> None:
    """Write report.md, report.json, the resolved config, and the figure as .svg and .png."""
    write_json(folder / "report.json", {"methods": [result.to_json() for result in results]})
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
