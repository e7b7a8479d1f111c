"""What a comparison holds: its tables, notes and figures, as a page, as Markdown and as JSON."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scale_cli.comparison.runs import (
    ComparedRun,
    Option,
    benchmarks_of,
    beside_base,
    front,
    options_of,
    setup_differences,
    side_names,
)
from scale_cli.evaluation.results import BESIDE_BASE, FIGURES, ROLES, BenchmarkResult, CorpusResult, Figure
from scale_cli.report.figures import AXIS, COLOURS, MARKS, draw_point, shorten, svg
from scale_cli.report.numbers import (
    DASH,
    NOT_RECORDED,
    Interval,
    bounds,
    difference_in_words,
    in_points,
    number,
    p_value,
    quantity,
    shows_difference,
)
from scale_cli.report.tables import Cell, Row, Table, difference_cell, markdown, page
from scale_cli.storage.atomic import write_json, write_text
from scale_cli.values import language_name

# What report.json says of itself; a folder whose report says this may be replaced by another comparison.
KIND = "scale comparison"
Draw = Callable[[Any], None]
_WIDTH_INCHES = 5.0
_LINEAR_BELOW = 0.01  # bits/byte forgotten; more of it on a logarithmic axis


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    runs: list[ComparedRun]
    options: list[Option]
    best: list[Option]  # that no other beats, or no other of one model


def compare_runs(runs: list[ComparedRun]) -> Comparison:
    """Return the comparison of some runs, in their order; the base is one that reads its own tokens, if any does."""
    untouched = next((run for run in runs if not run.new_tokens), runs[0]).report
    options = [option for run in runs for option in options_of(run, untouched)]
    best = front(options, 1) + front(options, 2) if untouched.has_trade_off else []
    return Comparison(runs, options, best)


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know before comparing: unequal budgets and settings, figures that are not there."""
    runs, lines = comparison.runs, []
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        lines.append(f"The runs were not trained on the same number of tokens: {spent}.")
    if len({run.new_tokens for run in runs}) > 1:
        held = ", ".join(
            f"{run.name} {' '.join(number(corpus.bytes_per_token, 2) for corpus in run.report.corpora)}" for run in runs
        )
        lines.append(
            "The runs have different tokens: bits/byte compare between them, figures of a token do not. A difference "
            f"between different tokens has no interval. Bytes a token, by corpus: {held}."
        )
    for name, changed in setup_differences(runs).items():
        lines.append(f"Set up otherwise than {runs[0].name}: {name} in {'; '.join(changed)}.")
    if len({(run.cost.device, run.cost.num_processes) for run in runs if run.cost}) > 1:
        found = ", ".join(f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs if run.cost)
        lines.append(f"The runs were trained on different devices; speed and memory do not compare: {found}.")
    if means := [f"{run.name} (of {run.num_averaged})" for run in runs if run.num_averaged]:
        lines.append(f"Means of weights: {', '.join(means)}; their training is that of the last one averaged.")
    for run in runs:
        for benchmark in run.report.skipped_benchmarks:
            lines.append(f"{run.name}: {benchmark.name} was not measured ({benchmark.reason}).")
    odd = [option.label for option in comparison.options if not option.is_finite]
    if runs[0].report.has_trade_off and odd:
        lines.append(f"Left out of the trade-off picture, without a finite loss on both sides: {', '.join(odd)}.")
    return lines


def tables(comparison: Comparison) -> list[Table]:
    """Return the methods, every corpus and every benchmark; a row is an option, or the base."""
    options, runs = comparison.options, comparison.runs
    return [
        _methods_table(comparison),
        *(_corpus_table(options, corpus) for corpus in runs[0].report.corpora),
        *(_benchmark_table(options, result) for result in benchmarks_of(runs)),
    ]


def _methods_table(comparison: Comparison) -> Table:
    report = comparison.runs[0].report
    languages = list(dict.fromkeys(corpus.language for corpus in report.corpora))
    titles = [
        Cell("method"),
        *(Cell(side, "bits/byte, 95 %") for side in side_names(report)),
        Cell("by base head", f"% of {' / '.join(languages)}"),
        Cell("weights", "× base"),
        Cell("passes", "a token"),
        Cell("trainable", "parameters"),
        Cell("training", "tokens/s"),
        Cell("peak memory", "of training"),
    ]

    def row(option: Option) -> Row:
        run, bold, shares, cost = option.run, option in comparison.best, option.base_share, option.run.cost
        held = option.parameters, option.parameters_of_base
        return [
            Cell(option.label, f"{run.method.in_words}; served {option.served}"),
            replace(difference_cell(option.lost), bold=bold),
            replace(difference_cell(option.gained), bold=bold),
            " / ".join(f"{100 * shares[code]:.1f}" for code in languages) if shares else DASH,
            f"{held[0] / held[1]:.2f} ×" if held[0] and held[1] else NOT_RECORDED,
            option.passes,
            quantity(None if cost is None else cost.trainable_parameters),
            f"{run.tokens_per_s:,.0f}",
            quantity(None if cost is None else cost.peak_memory_bytes, "B"),
        ]

    variants = [option.run.method.variant for option in comparison.options]
    return Table(titles, [row(option) for option in comparison.options], "lrrrrrrrr", "Methods", variants)


def _corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    """Return every base's figures, in its own tokens, and every option's; figures of a token where alike."""
    shown = [figure for figure in FIGURES if figure.compared]
    titles = [Cell("method"), Cell("bytes", "a token"), *(Cell(figure.title, figure.unit) for figure in shown)]
    untouched = options[0].untouched.corpus(corpus.name)

    def row(label: str, result: CorpusResult, head: str, difference: Interval | None) -> Row:
        figures = result.heads[head]
        if difference is not None:
            figures = replace(figures, bits_per_byte_difference=difference)
        alike = result.num_tokens == untouched.num_tokens

        def cell(figure: Figure) -> str | Cell:
            hidden = head == "base" and not figure.of_base and (difference is None or figure is not BESIDE_BASE)
            return DASH if hidden or (not alike and (figure.per_token or figure.of_own_base)) else figure.cell(figures)

        return [label, number(result.bytes_per_token, 2), *map(cell, shown)]

    bases, rows = {untouched.num_tokens: row("base", untouched, "base", None)}, []
    for option in options:
        result = option.run.report.corpus(corpus.name)
        rows.append(row(option.label, result, option.head, beside_base(option.untouched, result, option.head)))
        own = f"base, tokens of {option.run.name}"
        bases.setdefault(result.num_tokens, row(own, result, "base", beside_base(option.untouched, result, "base")))
    name = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    marks = ["base"] * len(bases) + [option.run.method.variant for option in options]
    table = Table(titles, [*bases.values(), *rows], "l" + "r" * (len(titles) - 1), name, marks)
    return table.without_empty_columns()


def _benchmark_table(options: Sequence[Option], result: BenchmarkResult) -> Table:
    metrics = result.heads["base"].metrics
    titles = [
        Cell("method"),
        *(Cell(metric.replace("_", " "), "%, 95 %") for metric in metrics),
        Cell(f"{result.judged_by.replace('_', ' ')} − base", "points, 95 %"),
        Cell("items", "gained / lost"),
        Cell("difference", "Holm-corrected"),
    ]

    def row(option: Option) -> Row:
        measured = option.run.report.benchmark(result.name)
        if measured is None:
            return [option.label, "not measured", *[DASH] * (len(metrics) + 2)]
        head = measured.heads[option.head]
        difference, p = head.differences[measured.judged_by], head.p_holm
        return [
            option.label,
            *(_points(head.metrics[metric]) for metric in metrics),
            _points(difference, "+"),
            DASH if head.gained is None else f"{head.gained} / {head.lost}",
            Cell(difference_in_words(difference, p), "" if p is None else p_value(p)),
        ]

    base: Row = ["base", *map(_points, metrics.values()), DASH, DASH, DASH]
    name = f"{result.name}: {language_name(result.language)}, {result.role}, {result.num_items:,} items"
    variants = ["base", *(option.run.method.variant for option in options)]
    return Table(titles, [base, *map(row, options)], "l" + "r" * (len(titles) - 1), name, variants)


def _points(share: Interval, sign: str = "") -> Cell:
    points = in_points(share)
    return Cell(number(points.value, 1, sign), bounds(points, 1, sign))


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write report.json, report.md with its figures beside it, and report.html, which asks for nothing from outside."""
    drawn = [(name, title, svg(draw)) for name, title, draw in figures_of(comparison.runs, comparison.options)]
    for name, _, figure in drawn:
        write_text(folder / f"{name}.svg", figure)
    told = {"comparison": comparison, "notes": notes(comparison), "tables": tables(comparison), "figures": drawn}
    images = [(title, b64encode(figure.encode()).decode()) for _, title, figure in drawn]
    signs = {variant: sign for variant, (_, sign) in MARKS.items()}
    write_json(folder / "report.json", to_json(comparison))
    write_text(folder / "report.md", markdown("comparison.md.j2", **told))
    write_text(folder / "report.html", page("comparison.html.j2", **told, images=images, colours=COLOURS, signs=signs))


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return report.json: what was read, unchanged, and what was made of it."""
    name, content_sha256 = comparison.runs[0].base
    return {
        "kind": KIND,
        "base": {"name": name, "content_sha256": content_sha256},
        "notes": notes(comparison),
        "options": [
            {
                "run": option.run.name,
                "label": option.label,
                "head": option.head,
                "num_models": option.num_models,
                "passes": option.passes,
                "parameters": option.parameters,
                "parameters_of_base": option.parameters_of_base,
                "bits_per_byte_lost": asdict(option.lost),
                "bits_per_byte_gained": asdict(option.gained),
                "base_share_by_language": option.base_share,
                "non_dominated": option in comparison.best,
            }
            for option in comparison.options
        ],
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "method_in_words": run.method.in_words,
                "method": run.method.model_dump(mode="json"),
                "tokens_per_s": run.tokens_per_s,
                "cost": None if run.cost is None else asdict(run.cost),
                "curves": {corpus: [asdict(point) for point in points] for corpus, points in run.curves.items()},
                "report": run.raw_report,
            }
            for run in comparison.runs
        ],
    }


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
