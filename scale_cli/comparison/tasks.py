"""Bars by benchmark: how far each run's accuracy is from the base's."""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.comparison.runs import ComparedRun
from scale_cli.comparison.svg import Axis, Canvas, Point, shortened, text_width, tick_text
from scale_cli.comparison.tables import SIGNIFICANCE, benchmark_of, benchmarks_of, verdict
from scale_cli.comparison.words import points, points_interval
from scale_cli.evaluation.render import language_name
from scale_cli.evaluation.results import BenchmarkHead, BenchmarkResult

_ROW = 22.0
_SIZE = 12.0
_HEAD, _FOOT, _GUTTER, _FIGURES = 44.0, 46.0, 28.0, 48.0


def draw_tasks(runs: Sequence[ComparedRun], width: float) -> Canvas:
    """Draw one panel for every benchmark, all on one scale, with a bar for every run.

    Args:
        runs: at least one of which measured a benchmark.
        width: of the figure, in pixels.
    """
    results = benchmarks_of([run.report for run in runs])
    columns = 1 if width < 600 else min(2, len(results))
    panel = ((width - _GUTTER * (columns - 1)) / columns, _HEAD + _ROW * len(runs) + _FOOT)
    canvas = Canvas(width, -(-len(results) // columns) * panel[1])
    labels = min(0.3 * panel[0], max(text_width(run.name, _SIZE) for run in runs) + 4)
    low, high = _reach(runs, results)
    for index, result in enumerate(results):
        corner = (index % columns * (panel[0] + _GUTTER), index // columns * panel[1])
        across = Axis(low, high, corner[0] + labels + 10, corner[0] + panel[0] - _FIGURES)
        _draw_panel(canvas, runs, result, corner, across)
    return canvas


def _reach(runs: Sequence[ComparedRun], results: Sequence[BenchmarkResult]) -> Point:
    ends = [0.0]
    for run in runs:
        heads = [_served(run, result.name) for result in results]
        differences = [head.differences["acc"] for head in heads if head is not None]
        ends += [end for d in differences for end in (d.value, d.low, d.high) if end is not None]
    pad = 0.05 * (max(ends) - min(ends)) or 0.01
    return min(ends) - pad, max(ends) + pad


def _served(run: ComparedRun, name: str) -> BenchmarkHead | None:
    result = benchmark_of(run.report, name)
    return None if result is None else result.heads[run.report.served]


def _draw_panel(
    canvas: Canvas, runs: Sequence[ComparedRun], result: BenchmarkResult, corner: Point, across: Axis
) -> None:
    right = across.stop + _FIGURES
    base = f"base {points(result.heads['base'].metrics['acc'].value)} % of {result.num_items:,} items"
    title = shortened(f"{result.name}, {language_name(result.language)}", 13, right - corner[0])
    canvas.text((corner[0] + 2, corner[1] + 14), title, size=13, style="strong")
    canvas.text((corner[0] + 2, corner[1] + 31), base, size=11, colour="muted")
    top, bottom = corner[1] + _HEAD, corner[1] + _HEAD + _ROW * len(runs)
    for tick in across.ticks(4):
        canvas.line([(across(tick), top), (across(tick), bottom)], "axis" if tick == 0 else "grid")
        text = tick_text(100 * tick)
        canvas.text((across(tick), bottom + 15), text, size=10.5, colour="muted", anchor="middle")
    middle = (across.start + across.stop) / 2
    canvas.text((middle, bottom + 32), "accuracy − base, points", size=11, anchor="middle")
    for index, run in enumerate(runs):
        y = top + _ROW * (index + 0.5)
        label = shortened(run.name, _SIZE, across.start - 10 - corner[0])
        canvas.text(
            (across.start - 10, y + 4), label, size=_SIZE, anchor="end", colour=run.method.variant, style="strong"
        )
        _draw_bar(canvas, run, _served(run, result.name), across, y)


def _draw_bar(canvas: Canvas, run: ComparedRun, head: BenchmarkHead | None, across: Axis, y: float) -> None:
    end, variant = across.stop + _FIGURES - 2, run.method.variant
    difference = None if head is None else head.differences["acc"]
    if head is None or difference is None or difference.value is None:
        canvas.text((end, y + 4), "none", size=_SIZE, colour="muted", anchor="end")
        return
    left, right = sorted((across(0.0), across(difference.value)))
    shown = head.p_holm is not None and head.p_holm < SIGNIFICANCE
    told = f"{run.name}: {points(difference.value, '+')} {points_interval(difference, '+')}, "
    canvas.bar(
        (left, y - 6),
        (right - left, 12),
        variant,
        variant if shown else "paper",
        told + verdict(difference.value, head.p_holm),
    )
    if difference.low is not None and difference.high is not None:
        canvas.line([(across(difference.low), y), (across(difference.high), y)], "ink", 1.2)
    canvas.text((end, y + 4), points(difference.value, "+"), size=_SIZE, anchor="end")
