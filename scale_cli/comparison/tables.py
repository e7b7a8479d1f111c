"""The tables of a comparison: the methods, every corpus, every benchmark. A row is an option, or the base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scale_cli.comparison.options import Option, beside_base, languages_of
from scale_cli.comparison.runs import ComparedRun, benchmarks_of
from scale_cli.config.display_names import language_name, method_in_words
from scale_cli.evaluation.results import ROLES, BenchmarkResult, CorpusResult, HeadResult
from scale_cli.report.numbers import (
    DASH,
    NOT_RECORDED,
    Interval,
    bounds,
    difference_in_words,
    digits_for,
    in_points,
    number,
    p_value,
    percent,
    perplexity,
    quantity,
    worst_document,
)
from scale_cli.report.tables import Cell, Column, Row, Table, share_cell


def side_titles(options: Sequence[Option]) -> tuple[str, str]:
    """Return what the two sides are called: `English lost`, `Korean gained`."""
    lost, gained = (languages_of(options[0].run.report, role) for role in ("retention", "acquisition"))
    return f"{lost or 'Known language'} lost", f"{gained or 'New language'} gained"


def methods_table(options: Sequence[Option], best: Sequence[Option]) -> Table:
    """Return every option's figures in a row, those of `best` in bold; what is of the training, in its first row."""
    languages = list(dict.fromkeys(corpus.language for corpus in options[0].run.report.corpora))
    lost, gained = side_titles(options)
    lost_digits, gained_digits = (
        digits_for(getattr(option, side) for option in options) for side in ("lost", "gained")
    )
    firsts = [index == 0 or option.run is not options[index - 1].run for index, option in enumerate(options)]
    of_run = {option.label for option, first in zip(options, firsts, strict=True) if first}

    def of_training(figure: Callable[[ComparedRun], str]) -> Callable[[Option], str]:
        return lambda option: figure(option.run) if option.label in of_run else ""

    columns: list[Column[Option]] = [
        Column(Cell("method"), lambda option: Cell(option.label, _described(option)), "l"),
        Column(Cell(lost, "bits/byte, 95 %"), lambda option: _difference(option.lost, lost_digits, option in best)),
        Column(
            Cell(gained, "bits/byte, 95 %"), lambda option: _difference(option.gained, gained_digits, option in best)
        ),
        Column(Cell("by base head", f"% of {' / '.join(languages)}"), lambda option: _shares(option, languages)),
        Column(
            Cell("weights", "× base"),
            lambda option: Cell(_times_base(option), "two models" if option.num_models == 2 else ""),
        ),
        Column(Cell("passes", "a token"), lambda option: _unbroken(option.passes)),
        Column(Cell("trainable", "parameters"), of_training(lambda run: quantity(run.trainable_parameters))),
        Column(Cell("training", "tokens/s"), of_training(lambda run: f"{run.tokens_per_s:,.0f}")),
        Column(Cell("peak memory", "of training"), of_training(lambda run: quantity(run.peak_memory_bytes, "B"))),
    ]
    return Table.of(columns, options, methods=[o.run.method.variant for o in options], groups=firsts)


def _described(option: Option) -> str:
    """Return how the model was trained, under the row of its own; under any other, how it is served."""
    if option.head == option.run.report.served:
        return f"{method_in_words(option.run.method)}; served {option.served}"
    return f"served {option.served}"


def _shares(option: Option, languages: Sequence[str]) -> str:
    shares = option.base_share
    return _unbroken(" / ".join(f"{100 * shares[code]:.1f}" for code in languages)) if shares else DASH


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _times_base(option: Option) -> str:
    if option.parameters is None or not option.parameters_of_base:
        return NOT_RECORDED
    return f"{option.parameters / option.parameters_of_base:.2f} ×"


def _difference(interval: Interval, digits: int, bold: bool = False) -> Cell:
    return Cell(number(interval.value, digits, "+"), bounds(interval, digits), bold)


def corpus_tables(options: Sequence[Option]) -> list[Table]:
    """Return a table for every held-out corpus."""
    return [_corpus_table(options, corpus) for corpus in options[0].run.report.corpora]


@dataclass(frozen=True)
class _Scored:
    """What a head was measured to pay for a corpus."""

    label: str
    method: str  # whose mark stands before it
    corpus: CorpusResult
    head: str
    difference: Interval | None  # from the base; None of the base itself

    @property
    def result(self) -> HeadResult:
        """The head's figures."""
        return self.corpus.heads[self.head]


def _corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    """Return every base's figures, in its own tokens, and every option's.

    Perplexity is of a token, and the worst document beside the base that reads the run's own: both compare with the
    others' where the tokens are the same.
    """
    rows = _scored(options, corpus.name)
    digits, base = digits_for(row.difference for row in rows if row.difference and row.head != "base"), rows[0].corpus

    def alike(row: _Scored) -> bool:
        return row.corpus.num_tokens == base.num_tokens

    columns: list[Column[_Scored]] = [
        Column("method", lambda row: row.label, "l"),
        Column("bits/byte", lambda row: number(row.result.bits_per_byte)),
        Column(
            Cell("bits/byte − base", "95 % interval"),
            lambda row: DASH if row.difference is None else _difference(row.difference, digits),
        ),
        Column(Cell("perplexity", "of a token"), lambda row: perplexity(row.result.perplexity) if alike(row) else DASH),
        Column(Cell("bytes", "a token"), lambda row: number(row.corpus.bytes_per_token, 2)),
        Column(
            Cell("worst document", "nats lost against the base"),
            lambda row: worst_document(row.result.worst_document_nats) if alike(row) and row.head != "base" else DASH,
        ),
        Column(
            Cell("by base head", "of the tokens"),
            lambda row: DASH if row.result.base_share is None or row.head == "base" else percent(row.result.base_share),
        ),
    ]
    if any(row.corpus.num_prompts for row in rows):
        in_script = Cell("in its script", "letters after prompts, 95 %")
        columns.append(Column(in_script, lambda row: share_cell(row.result.in_script)))
    title = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    return Table.of(columns, rows, name=title, methods=[row.method for row in rows])


def _scored(options: Sequence[Option], corpus: str) -> list[_Scored]:
    """Return the base that the options are held against, those of other tokens, and the options."""
    base = options[0].untouched.corpus(corpus)
    bases = {base.num_tokens: _Scored("base", "base", base, "base", None)}
    rows = []
    for option in options:
        result, variant = option.run.report.corpus(corpus), option.run.method.variant
        difference = beside_base(option.untouched, result, option.head)
        rows.append(_Scored(option.label, variant, result, option.head, difference))
        label, of_tokens = f"base, tokens of {option.run.name}", beside_base(options[0].untouched, result, "base")
        bases.setdefault(result.num_tokens, _Scored(label, "base", result, "base", of_tokens))
    return [*bases.values(), *rows]


def benchmark_tables(options: Sequence[Option]) -> list[Table]:
    """Return a table of the averages per language, and one for every benchmark; none where none was measured."""
    results = benchmarks_of([option.run for option in options])
    return [_averages_table(options), *(_benchmark_table(options, result) for result in results)] if results else []


def _benchmark_table(options: Sequence[Option], result: BenchmarkResult) -> Table:
    metrics = result.heads["base"].metrics
    titles = [
        *(Cell(metric.replace("_", " "), "%, 95 %") for metric in metrics),
        Cell(f"{result.judged_by.replace('_', ' ')} − base", "points, 95 %"),
        Cell("items", "gained / lost"),
        Cell("difference", "Holm-corrected"),
    ]
    rows = [_benchmark_cells(option, result.name, list(metrics)) for option in options]
    before: Row = [*(_points(metric) for metric in metrics.values()), DASH, DASH, DASH]
    title = f"{result.name}: {language_name(result.language)}, {result.role}, {result.num_items:,} items"
    return _beside_base(title, titles, before, options, rows)


def _benchmark_cells(option: Option, name: str, metrics: Sequence[str]) -> Row:
    result = option.run.report.benchmark(name)
    if result is None:
        return ["not measured", *[DASH] * (len(metrics) + 2)]
    head = result.heads[option.head]
    difference = head.differences[result.judged_by]
    return [
        *(_points(head.metrics[metric], bounds_sign="") for metric in metrics),
        _points(difference, "+", "+"),
        DASH if head.gained is None else f"{head.gained} / {head.lost}",
        Cell(difference_in_words(difference, head.p_holm), "" if head.p_holm is None else p_value(head.p_holm)),
    ]


def _averages_table(options: Sequence[Option]) -> Table:
    by_option = [{average.language: average for average in o.run.report.benchmark_averages} for o in options]
    averages = {language: average for found in by_option for language, average in found.items()}
    rows: list[Row] = [
        [
            _points(found[language].acc_difference[option.head], "+", "+") if language in found else DASH
            for language in averages
        ]
        for option, found in zip(options, by_option, strict=True)
    ]
    titles = [Cell(language_name(code), f"acc, mean of {of.num_benchmarks}") for code, of in averages.items()]
    before = [_points(average.acc["base"]) for average in averages.values()]
    title = "Averages: the base’s accuracy in %, and differences from it in points"
    return _beside_base(title, titles, before, options, rows)


def _points(share: Interval, sign: str = "", bounds_sign: str | None = None) -> Cell:
    """Return an accuracy in percent, or with signs a difference of two in points; with its interval if asked for."""
    points = in_points(share)
    return Cell(number(points.value, 1, sign), "" if bounds_sign is None else bounds(points, 1, bounds_sign))


def _beside_base(name: str, titles: Row, base: Row, options: Sequence[Option], rows: Sequence[Row]) -> Table:
    """Return a table with the base's figures in its first row, and one row for every option."""
    labelled = [["base", *base], *([option.label, *row] for option, row in zip(options, rows, strict=True))]
    methods = ["base", *(option.run.method.variant for option in options)]
    return Table(["method", *titles], labelled, "l" + "r" * len(titles), name, methods)
