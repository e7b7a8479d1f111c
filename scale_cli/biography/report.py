"""The report of a biography benchmark: the paper's figure, a table, and whether the bars were met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scale_cli.biography.results import MethodResult, served_lines, verdicts
from scale_cli.comparison.palette import light_colour
from scale_cli.config.biography import BiographyConfig
from scale_cli.config.load import dump_config
from scale_cli.storage.atomic import write_json, write_text

_MARKERS = {"full": "o", "lora": "s", "freeze": "^", "llama-pro": "D", "preserve": "v", "adapt": "X", "route": "*"}


def write_report(folder: Path, config: BiographyConfig, results: list[MethodResult]) -> None:
    """Write report.md, report.json, the resolved config, and the figure as .svg and .png."""
    write_json(folder / "report.json", {"methods": [result.to_json() for result in results]})
    write_text(folder / "biography.yaml", dump_config(config))
    write_text(folder / "report.md", _markdown(config, results))
    _draw(results, folder)


def _markdown(config: BiographyConfig, results: list[MethodResult]) -> str:
    people, lines = config.people, served_lines(results)
    table = [
        "| served | trainable parameters | Task 0, start | Task 0, lowest | Task 0, end | Task 1, end | s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        shares = (line.task_0[0], min(line.task_0), line.task_0[-1], line.task_1[-1])
        told = " | ".join(f"{share:.1%}" for share in shares)
        result = line.result
        table.append(f"| {line.label} | {result.trainable_parameters:,} | {told} | {result.training_s:,.0f} |")
    beside = [
        "| trained model | Task 0, end | Task 1, end |",
        "|---|---:|---:|",
        *(
            f"| {result.name} | {result.task_0['posterior'][-1]:.1%} | {result.task_1['posterior'][-1]:.1%} |"
            for result in results
            if result.variant not in ("preserve", "adapt", "route")
        ),
    ]
    return "\n".join(
        [
            "# Biography benchmark",
            "",
            f"{people.pretraining:,} synthetic people were pre-trained ({people.biographies_each} biographies each); "
            f"Task 0 asks six questions on each of {people.task_0:,} of them, Task 1 on each of {people.task_1:,} "
            "people never seen. Every method learns Task 1 from the same base, on the same "
            f"{config.task_1.max_steps:,} batches of {config.task_1.batch_size} questions in the same order, one seed "
            f"({config.seed}). Learning rates are the config's; they were not tuned one against another.",
            "",
            "Hard first-token accuracy: the share of questions after which the likeliest token is the first of the "
            "answer. Source: SCALE, arXiv 2511.03270.",
            "",
            "![Accuracy on Task 0 and Task 1 against training steps](accuracy.svg)",
            "",
            *(f"- {sentence}" for sentence in verdicts(lines)),
            "",
            *table,
            "",
            "What the methods that widen nothing would answer if they were served beside the untouched base, mixed by "
            "the same posterior rule (two models, two forwards):",
            "",
            *beside,
            "",
        ]
    )


def _draw(results: list[MethodResult], folder: Path) -> None:
    import matplotlib  # takes a second, and only this needs it

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scale"}):
        figure, panels = plt.subplots(1, 2, figsize=(10.4, 4.2), sharey=True, layout="constrained")
        for panel, task, title in zip(panels, ("task_0", "task_1"), ("Task 0, kept", "Task 1, learned"), strict=True):
            for line in served_lines(results):
                _draw_line(panel, line.label, line.variant, line.served, line.result.steps, getattr(line, task))
            panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
            panel.set_xlabel("training steps on Task 1")
            panel.set_ylim(-3, 105)
            panel.grid(axis="y", color=light_colour("grid"))
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("hard first-token accuracy, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside right center")
        figure.savefig(folder / "accuracy.svg", metadata={"Date": None})
        figure.savefig(folder / "accuracy.png", dpi=160)
        plt.close(figure)


def _draw_line(panel: Any, label: str, variant: str, served: str, steps: list[int], shares: list[float]) -> None:
    panel.plot(
        steps,
        [100 * share for share in shares],
        label=label,
        color=light_colour(variant),
        marker=_MARKERS[variant],
        markersize=6,
        markevery=max(1, len(steps) // 8),
        linewidth=2.4 if served == "posterior" else 1.6,
        linestyle="--" if served == "cosine" else "-",
    )
