"""The tables by corpus and by benchmark, ready to be written as HTML or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_cli.comparison.options import Option
from scale_cli.comparison.words import digits_for, interval_text, percent, points, points_interval, signed
from scale_cli.evaluation.render import language_name, number, perplexity, worst_document
from scale_cli.evaluation.results import BenchmarkResult, CorpusResult, Report

# Below this, after Holm's correction, a difference is called one.
SIGNIFICANCE = 0.05
_DASH = "—"

# A figure, and what stands small beneath it.
Cell = tuple[str, str]


@dataclass(frozen=True)
class TableRow:
    """One row: its method (which gives it a mark), its label, its figures."""

    variant: str
    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A table whose rows are the base and the options."""

    title: str
    columns: list[Cell]
    rows: list[TableRow]


def corpus_tables(options: Sequence[Option]) -> list[Table]:
    """Return a table for every held-out corpus."""
    return [_corpus_table(options, index) for index in range(len(options[0].run.report.corpora))]


def _corpus_table(options: Sequence[Option], index: int) -> Table:
    corpus = options[0].run.report.corpora[index]
    digits = digits_for(_corpus(option, index).heads[option.head].bits_per_byte_difference for option in options)
    base = corpus.heads["base"]
    before: list[Cell] = [(number(base.bits_per_byte), ""), (_DASH, ""), (perplexity(base.perplexity), "")]
    rows = [TableRow("base", "base", [*before, (_DASH, ""), (_DASH, "")])]
    for option in options:
        head = _corpus(option, index).heads[option.head]
        difference = head.bits_per_byte_difference
        cells = [
            (number(head.bits_per_byte), ""),
            (signed(difference.value, digits), interval_text(difference, digits)),
            (perplexity(head.perplexity), ""),
            (worst_document(head.worst_document_nats), ""),
            (_DASH if head.base_share is None else percent(head.base_share), ""),
        ]
        rows.append(TableRow(option.run.method.variant, option.label, cells))
    meaning = "what the base knew" if corpus.role == "retention" else "what it was taught"
    columns = [
        ("bits/byte", ""),
        ("bits/byte − base", "95 % interval"),
        ("perplexity", ""),
        ("worst document", "nats lost against the base"),
        ("by base head", "of the tokens"),
    ]
    title = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({meaning})"
    return Table(title, columns, rows)


def _corpus(option: Option, index: int) -> CorpusResult:
    name = option.run.report.corpora[index].name
    # The first run gives the order; another config may list the same corpora otherwise.
    return next(corpus for corpus in option.run.report.corpora if corpus.name == name)


def benchmarks_of(reports: Sequence[Report]) -> list[BenchmarkResult]:
    """Return every benchmark that some report measured, once, in the order met."""
    found = {result.name: result for report in reversed(reports) for result in reversed(report.benchmarks)}
    return list(reversed(found.values()))


def benchmark_of(report: Report, name: str) -> BenchmarkResult | None:
    """Return what a report says of a benchmark, where it does."""
    return next((result for result in report.benchmarks if result.name == name), None)


def benchmark_tables(options: Sequence[Option]) -> list[Table]:
    """Return a table of the averages per language, and one for every benchmark; none where none was measured."""
    results = benchmarks_of([option.run.report for option in options])
    if not results:
        return []
    return [_averages_table(options), *(_benchmark_table(options, result) for result in results)]


def _benchmark_table(options: Sequence[Option], result: BenchmarkResult) -> Table:
    metrics = list(result.heads["base"].metrics)
    before: list[Cell] = [(points(result.heads["base"].metrics[metric].value), "") for metric in metrics]
    rows = [TableRow("base", "base", [*before, (_DASH, ""), (_DASH, ""), (_DASH, "")])]
    for option in options:
        same = benchmark_of(option.run.report, result.name)
        if same is None:
            rows.append(
                TableRow(
                    option.run.method.variant, option.label, [("not measured", "")] + [(_DASH, "")] * (len(metrics) + 2)
                )
            )
            continue
        head = same.heads[option.head]
        difference = head.differences["acc"]
        cells: list[Cell] = [
            (points(head.metrics[metric].value), points_interval(head.metrics[metric])) for metric in metrics
        ]
        cells.append((points(difference.value, sign="+"), points_interval(difference, sign="+")))
        cells.append((f"{head.gained} / {head.lost}" if head.gained is not None else _DASH, ""))
        cells.append((verdict(difference.value, head.p_holm), "" if head.p_holm is None else f"p = {head.p_holm:.3g}"))
        rows.append(TableRow(option.run.method.variant, option.label, cells))
    columns = [
        *((metric.replace("_", " "), "%, 95 %") for metric in metrics),
        ("acc − base", "points, 95 %"),
        ("items", "gained / lost"),
        ("difference", "Holm-corrected"),
    ]
    title = f"{result.name}: {language_name(result.language)}, {result.role}, {result.num_items:,} items"
    return Table(title, columns, rows)


def _averages_table(options: Sequence[Option]) -> Table:
    averages = {average.language: average for option in options for average in option.run.report.benchmark_averages}
    rows = [TableRow("base", "base", [(points(average.acc["base"].value), "") for average in averages.values()])]
    for option in options:
        of_run = {average.language: average for average in option.run.report.benchmark_averages}
        cells = []
        for language in averages:
            difference = of_run[language].acc_difference[option.head] if language in of_run else None
            cells.append(
                (_DASH, "")
                if difference is None
                else (points(difference.value, sign="+"), points_interval(difference, sign="+"))
            )
        rows.append(TableRow(option.run.method.variant, option.label, cells))
    columns = [
        (language_name(language), f"acc, mean of {average.num_benchmarks}") for language, average in averages.items()
    ]
    return Table("Averages: the base’s accuracy in %, and differences from it in points", columns, rows)


def verdict(difference: float | None, p_holm: float | None) -> str:
    """Return in a word what the test says of a difference."""
    if difference is None or p_holm is None:
        return "not tested"
    if p_holm >= SIGNIFICANCE:
        return "no difference shown"
    return "better" if difference > 0 else "worse"
