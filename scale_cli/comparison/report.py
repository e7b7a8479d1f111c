"""What a comparison holds: its tables and notes, as a page, as Markdown and as JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scale_cli.comparison.drawings import figures_of
from scale_cli.comparison.options import Option, beside_base, front, options_of, side_names
from scale_cli.comparison.runs import ComparedRun, benchmarks_of, setup_differences
from scale_cli.evaluation.results import BESIDE_BASE, FIGURES, ROLES, BenchmarkResult, CorpusResult, Figure
from scale_cli.report.figures import COLOURS, MARKS, svg
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
)
from scale_cli.report.tables import Cell, Row, Table, difference_cell, markdown, page
from scale_cli.storage.atomic import write_json, write_text
from scale_cli.values import language_name

# What report.json says of itself; a folder whose report says this may be replaced by another comparison.
KIND = "scale comparison"


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
