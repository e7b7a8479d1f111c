"""The tables of a comparison: of the ways of serving, of each corpus, of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.comparison.options import Option
from scale_cli.evaluation.results import FIGURES, ROLES, CorpusResult
from scale_cli.report import (
    DASH,
    Cell,
    Row,
    Table,
    difference_cell,
    number,
    quantity,
    verdict_of,
    with_interval,
)
from scale_cli.values import counted, language_name


def methods_table(options: Sequence[Option], sides: dict[str, str]) -> Table:
    """Return what each option lost and gained, and its cost; `sides` as in `Comparison.sides`."""
    corpora = options[0].run.report.corpora
    languages = dict.fromkeys(corpus.language for corpus in corpora)
    titles: Row = [
        "method",
        *(Cell(side, "bits/byte, 95 %") for side in sides.values()),
        Cell("by base head", f"% of {' / '.join(languages)}"),
        Cell("passes", "a token"),
        Cell("trainable", "parameters"),
        Cell("training", "tokens/s"),
        Cell("peak memory", "of training"),
    ]
    rows: list[Row] = []
    for option in options:
        cost = option.run.cost
        shares = option.base_share_by_language
        in_words = f"{option.run.config.method.in_words}; served {option.served}"
        rows.append(
            [
                Cell(option.label, in_words),
                *(difference_cell(getattr(option, side)) for side in sides),
                " / ".join(f"{100 * shares[code]:.1f}" for code in languages) if shares else DASH,
                option.passes,
                quantity(cost.trainable_parameters),
                DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f}",
                quantity(cost.peak_memory_bytes, "B"),
            ]
        )
    return _table("Methods", titles, rows, options)


def corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    """Return the base and each option; a run with new tokens has no figures per token."""
    shown = [figure for figure in FIGURES if figure.compared]
    titles: Row = [
        "method",
        Cell("bytes", "a token"),
        *(Cell(figure.title, figure.subtitle) for figure in shown),
    ]
    base = corpus.heads["base"]
    of_base = (figure.cell(base) if figure.of_base else DASH for figure in shown)
    rows: list[Row] = [["base", number(corpus.num_bytes / corpus.num_base_tokens, 2), *of_base]]
    for option in options:
        result = option.run.report.corpus(corpus.name)
        cells = (
            DASH
            if figure.per_token and result.has_new_tokens
            else figure.cell(result.heads[option.head])
            for figure in shown
        )
        rows.append([option.label, number(result.bytes_per_token, 2), *cells])
    name = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    return _table(name, titles, rows, options).without_empty_columns()


def benchmark_table(options: Sequence[Option]) -> Table:
    """Return the base's scores, and each option's difference from them."""
    measured = {result.name: result for of in options for result in of.run.report.benchmarks}
    titles: list[str | Cell] = ["method"]
    base: list[str | Cell] = ["base"]
    for name, result in measured.items():
        titles.append(
            Cell(name, f"{language_name(result.language)}, {counted(result.num_items, 'item')}")
        )
        base.append(number(result.heads["base"].metrics[result.judged_by].value))

    rows: list[Row] = [base]
    for option in options:
        row: list[str | Cell] = [option.label]
        for name in measured:
            result_of_run = option.run.report.benchmark(name)
            if result_of_run is None:
                row.append("not measured")
                continue
            head = result_of_run.heads[option.head]
            difference = with_interval(head.differences[result_of_run.judged_by])
            row.append(Cell(difference, verdict_of(head.p_holm)))
        rows.append(row)
    return _table("Benchmarks", titles, rows, options)


def _table(name: str, titles: Row, rows: list[Row], options: Sequence[Option]) -> Table:
    """Return a table whose last rows are of the options, each with the mark of its method."""
    methods = [option.run.config.method.variant for option in options]
    if len(rows) > len(options):
        methods.insert(0, "base")
    return Table(titles, rows, "l" + "r" * (len(titles) - 1), name, methods)
