"""How a run went, from its log: the learning curve, samples on the way, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scale_cli.errors import is_installed
from scale_cli.evaluation.render import History
from scale_cli.evaluation.results import Report
from scale_cli.report import DASH, Cell, Row, Table, drawn, duration, quantity
from scale_cli.training.metrics_log import BITS, SAMPLES, MetricsRecord
from scale_cli.training.records import Cost, TrainState
from scale_cli.values import counted

_POINTS = 500  # of a curve; the page has no room for more
_PANELS = 3  # side by side


@dataclass(frozen=True)
class Curve:
    """One loss over the steps."""

    label: str
    style: str  # matplotlib's, of the line and its marks
    points: list[tuple[int, float | None]]  # steps and losses; None: not finite


def history_of(
    records: Sequence[MetricsRecord], report: Report, cost: Table | None = None
) -> History:
    """Return how a run went; without matplotlib its learning curve is not drawn."""
    served = "trained" if report.served == "trained" else "routed"
    curve = draw(records, served, report.step) if is_installed("matplotlib") else ""
    return History(curve, samples(records), cost)


def draw(records: Sequence[MetricsRecord], served: str, measured_step: int) -> str:
    """Return an SVG of the losses in training and on held-out text; empty if the log has none.

    The step that the report measures is marked if the run went on.
    """
    panels = {("trained on", "nats/token"): training_curves(records)}
    for name, curves in held_out_curves(records, served).items():
        panels[name, "bits/byte"] = curves
    panels = {titles: curves for titles, curves in panels.items() if curves}
    if not panels:
        return ""
    num_rows = math.ceil(len(panels) / _PANELS)
    num_columns = min(len(panels), _PANELS)

    def paint(figure: Any) -> None:
        grid = figure.subplots(num_rows, num_columns, squeeze=False).flat
        for axes in list(grid)[len(panels) :]:
            axes.remove()
        for axes, ((title, unit), curves) in zip(figure.axes, panels.items(), strict=True):
            for curve in curves:
                every = math.ceil(len(curve.points) / _POINTS)
                steps, losses = zip(*curve.points[::-every], strict=True)
                axes.plot(steps, losses, curve.style, markersize=3, label=curve.label)
            if measured_step < records[-1]["step"]:
                axes.axvline(measured_step, color="#999999", linewidth=0.8, label="measured")
            axes.set(title=title, ylabel=unit, xlabel="step")
            axes.legend(fontsize="small")

    return drawn((3.6 * num_columns, 3.0 * num_rows), paint)


def training_curves(records: Sequence[MetricsRecord]) -> list[Curve]:
    """Return the loss of every source; where the log has none by source, that of whole steps."""
    points: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        if "loss" in record:
            for name, loss in record.get("loss_by_source", {"loss": record["loss"]}).items():
                points.setdefault(name, []).append((record["step"], loss))
    return [Curve(name, "-", of_one) for name, of_one in points.items()]


def held_out_curves(records: Sequence[MetricsRecord], served: str) -> dict[str, list[Curve]]:
    """Return, by text, the losses of the served head, of the trained one and of the base."""
    evaluations = [record for record in records if BITS in record]
    styles = {served: "-o", "trained": ":o", "base": "--"} | {served: "-o"}  # the served one first
    return {
        name: [
            Curve(
                label=head,
                style=style,
                points=[
                    (of["step"], of[BITS][name][head]) for of in evaluations if name in of[BITS]
                ],
            )
            for head, style in styles.items()
        ]
        for name in (evaluations[-1][BITS] if evaluations else ())
    }


def samples(records: Sequence[MetricsRecord]) -> list[Table]:
    """Return, for each held-out prompt, how the base continues it, and how the served head did first
    and last.
    """
    sampled = [record for record in records if record.get(SAMPLES)]
    tables = []
    for name, last in sampled[-1][SAMPLES].items() if sampled else ():
        said = {
            record["step"]: record[SAMPLES][name]["continuation"]
            for record in sampled
            if record[SAMPLES].get(name, {}).get("prompt") == last["prompt"]
        }
        ends = dict.fromkeys((min(said), max(said)))
        rows: list[Row] = [["the base", _on_one_line(last["base"])]]
        rows += [[f"after step {step:,}", _on_one_line(said[step])] for step in ends]
        titles = (Cell("prompt", name), _on_one_line(last["prompt"]))
        tables.append(Table(titles, rows, "ll", f"{name}: a prompt and its continuations"))
    return tables


def _on_one_line(text: str) -> str:
    """Return a text without line breaks and incomplete characters."""
    return " ".join(text.replace("\ufffd", "").split()) or DASH


def cost_table(state: TrainState, cost: Cost, work: float, evaluated_s: float) -> Table:
    """Return what a run took up to its kept weights; `work` is in FLOPs."""
    rows: list[Row] = [
        ["work", f"{quantity(work, 'FLOP')} of training"],
        [
            "time",
            f"{duration(state.elapsed_s)} of training: {duration(state.stepping_s)} of steps, "
            f"{duration(state.evaluating_s)} of evaluations, {duration(state.saving_s)} of waiting "
            f"for checkpoints; then {duration(evaluated_s)} for this report",
        ],
        ["speed", DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f} tokens/s"],
        ["parameters", f"{quantity(cost.trainable_parameters)} trained"],
        ["peak memory", f"{quantity(cost.peak_memory_bytes, 'B')} in training"],
        ["devices", f"{cost.num_processes} x {cost.device}"],
    ]
    trained = f"{counted(state.step, 'step')}, {counted(state.num_tokens, 'token')}"
    return Table(("trained on", trained), rows, "ll", "what the run cost")
