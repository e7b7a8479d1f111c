"""The figures of a comparison: trade-off, learning curves, benchmarks; each of a width that a phone shows whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scale_cli.comparison.options import Option, front, side_names
from scale_cli.comparison.runs import ComparedRun, benchmarks_of
from scale_cli.evaluation.results import BenchmarkResult, CorpusResult
from scale_cli.report.figures import AXIS, COLOURS, MARKS, draw_point, shorten
from scale_cli.report.numbers import Interval, in_points, quantity, shows_difference
from scale_cli.values import language_name

Draw = Callable[[Any], None]
_WIDTH_INCHES = 5.0
_LINEAR_BELOW = 0.01  # bits/byte forgotten; more of it on a logarithmic axis


def figures_of(runs: Sequence[ComparedRun], options: Sequence[Option]) -> list[tuple[str, str, Draw]]:
    """Return the figures of a comparison, each with the name of its file and its title."""
    shown = [option for option in options if option.is_finite]
    curves = [corpus for corpus in runs[0].report.corpora if any(corpus.name in run.curves for run in runs)]
    drawn: list[tuple[str, str, Draw]] = []
    if shown:
        drawn.append(("trade-off", "Trade-off", partial(_draw_trade_off, options=shown)))
    for index, corpus in enumerate(curves):
        draw = partial(_draw_curves, runs=runs, corpus=corpus)
        drawn.append((f"curve-{index}", f"Learning curve, {corpus.name}", draw))
    for index, result in enumerate(benchmarks_of(runs)):
        measured = partial(_draw_benchmark, runs=runs, result=result)
        drawn.append((f"benchmark-{index}", f"Benchmark {result.name}", measured))
    return drawn


def _axes(figure: Any, title: str, height_inches: float, num_labels: int = 0) -> Any:
    figure.set_size_inches(_WIDTH_INCHES, height_inches + 0.18 * math.ceil(num_labels / 2))
    axes = figure.subplots()
    axes.set_title(title)
    return axes


def _add_legend(figure: Any, axes: Any) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _draw_trade_off(figure: Any, options: Sequence[Option]) -> None:
    """Draw every option, numbered as in the legend, and a line through those that no other beats."""
    axes = _axes(figure, "Forgetting and gain against the base", 4.0, len(options) + 1)
    draw_point(axes, "base", Interval(0.0, None, None), Interval(0.0, None, None), COLOURS["base"], "o")
    for index, option in enumerate(options, 1):
        variant, filled = option.run.method.variant, option.num_models == 1
        mark, label = MARKS[variant][0], f"{index}  {option.label}"
        draw_point(axes, label, option.lost, option.gained, COLOURS[variant], mark, filled=filled)
        at = (option.lost.value, option.gained.value)
        axes.annotate(str(index), at, (6, 5), textcoords="offset points", color=COLOURS[variant], weight="bold")
    for admitted, style in ((1, "-"), (2, "--")):
        best = front(options, admitted)
        axes.plot(
            [option.lost.value for option in best],
            [option.gained.value for option in best],
            linestyle=style,
            color=AXIS,
            linewidth=1.4,
            zorder=1,
        )
    axes.set_xscale("symlog", linthresh=_LINEAR_BELOW)  # what forgets little stands apart from what forgets much
    axes.xaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    axes.margins(0.08)
    lost, gained = side_names(options[0].run.report)
    axes.set(xlabel=f"{lost}, bits/byte", ylabel=f"{gained}, bits/byte")
    _add_legend(figure, axes)


def _draw_curves(figure: Any, runs: Sequence[ComparedRun], corpus: CorpusResult) -> None:
    """Draw what each run serves over training; runs of different tokens in bits/byte, by the bytes a token."""
    shown = [run for run in runs if corpus.name in run.curves]
    role = "kept" if corpus.role == "retention" else "learned"
    axes = _axes(figure, f"{language_name(corpus.language)}, {role}: {shorten(corpus.name)}", 3.0, len(shown) + 1)
    in_bytes = len({run.report.corpus(corpus.name).num_tokens for run in shown}) > 1

    def unit_of(run: ComparedRun) -> float:
        return 1.0 / (run.report.corpus(corpus.name).bytes_per_token * math.log(2)) if in_bytes else 1.0

    for index, run in enumerate(shown, 1):
        head, variant = "adapted" if run.report.served == "adapted" else "routed", run.method.variant
        points = [(point.num_tokens, point.nats_per_token.get(head)) for point in run.curves[corpus.name]]
        xs, ys = [at for at, _ in points], [math.nan if y is None else y * unit_of(run) for _, y in points]
        label = shorten(f"{index}  {run.name}")
        axes.plot(xs, ys, label=label, color=COLOURS[variant], marker=MARKS[variant][0], markevery=[-1], linewidth=1.8)
        axes.annotate(
            str(index), (xs[-1], ys[-1]), (7, -3), textcoords="offset points", color=COLOURS[variant], weight="bold"
        )
    before = shown[0].curves[corpus.name][0].nats_per_token["base"]
    if before is not None:
        axes.axhline(before * unit_of(shown[0]), label="base", color=COLOURS["base"], linestyle="--", linewidth=1.4)
    axes.set(xlabel="training tokens", ylabel="bits/byte" if in_bytes else "nats/token")
    axes.xaxis.set_major_formatter(lambda tokens, _: quantity(tokens))
    _add_legend(figure, axes)


def _draw_benchmark(figure: Any, runs: Sequence[ComparedRun], result: BenchmarkResult) -> None:
    """Draw a row for every run that has it; a filled mark where the test shows a difference."""
    axes = _axes(figure, f"{shorten(result.name)}, {language_name(result.language)}", 1.1 + 0.24 * len(runs))
    axes.axvline(0.0, color=AXIS, linewidth=1.0)
    for row, run in enumerate(runs):
        measured, variant = run.report.benchmark(result.name), run.method.variant
        if measured is None:
            continue
        head = measured.heads[run.report.served]
        points, none = in_points(head.differences[result.judged_by]), Interval(float(row), None, None)
        if points.value is not None:
            filled = shows_difference(head.p_holm)
            draw_point(axes, run.name, points, none, COLOURS[variant], MARKS[variant][0], filled=filled)
    axes.set_yticks(range(len(runs)), [shorten(run.name) for run in runs])
    axes.set(ylim=(len(runs) - 0.5, -0.5), xlabel="accuracy − base, points")
