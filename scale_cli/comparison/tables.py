"""The tables of a comparison: the methods, every corpus, every benchmark. A row is an option, or the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scale_cli.comparison.options import Option, beside_base, corpus_of, languages_of
from scale_cli.comparison.runs import benchmarks_of
from scale_cli.config.display_names import language_name, method_in_words
from scale_cli.evaluation.results import BenchmarkResult, CorpusResult
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
from scale_cli.report.tables import Cell, Row, Table


def side_titles(options: Sequence[Option]) -> tuple[str, str]:
    """Return what the two sides are called: `English lost`, `Korean gained`."""
    lost, gained = (languages_of(options[0].run.report, role) for role in ("retention", "acquisition"))
    return f"{lost or 'Known language'} lost", f"{gained or 'New language'} gained"


def methods_table(options: Sequence[Option], best: Sequence[Option]) -> Table:
    """Return every option's figures in a row, those of `best` in bold; what is of the training, in its first row."""
    languages = list(dict.fromkeys(corpus.language for corpus in options[0].run.report.corpora))
    digits = [digits_for(getattr(option, side) for option in options) for side in ("lost", "gained")]
    titles = [
        Cell("method"),
        *(Cell(title, "bits/byte, 95 %") for title in side_titles(options)),
        Cell("by base head", f"% of {' / '.join(languages)}"),
        Cell("weights", "× base"),
        Cell("passes", "a token"),
        Cell("trainable", "parameters"),
        Cell("training", "tokens/s"),
        Cell("peak memory", "of training"),
    ]
    firsts = [index == 0 or option.run is not options[index - 1].run for index, option in enumerate(options)]
    rows: list[Row] = [
        [
            Cell(option.label, _described(option)),
            *(
                _difference(side, count, option in best)
                for side, count in zip((option.lost, option.gained), digits, strict=True)
            ),
            _shares(option, languages),
            Cell(_times_base(option), "two models" if option.num_models == 2 else ""),
            _unbroken(option.passes),
            *(_training(option) if first else [""] * 3),
        ]
        for option, first in zip(options, firsts, strict=True)
    ]
    return Table(titles, rows, "lrrrrrrrr", methods=[o.run.method.variant for o in options], groups=firsts)


def _described(option: Option) -> str:
    """Return how the model was trained, under the row of its own; under any other, how it is served."""
    if option.head == option.run.report.served:
        return f"{method_in_words(option.run.method)}; served {option.served}"
    return f"served {option.served}"


def _training(option: Option) -> list[str]:
    run = option.run
    return [quantity(run.trainable_parameters), f"{run.tokens_per_s:,.0f}", quantity(run.peak_memory_bytes, "B")]


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


def _corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    results = [corpus_of(option.run.report, corpus.name) for option in options]
    differences = [beside_base(o.untouched, result, o.head) for o, result in zip(options, results, strict=True)]
    digits, base = digits_for(differences), corpus_of(options[0].untouched, corpus.name)
    with_script = any(result.num_prompts for result in results)
    rows: list[Row] = [
        _corpus_cells(result, option.head, _difference(difference, digits), base, with_script)
        for option, result, difference in zip(options, results, differences, strict=True)
    ]
    meaning = "what the base knew" if corpus.role == "retention" else "what it was taught"
    titles = [
        Cell("bits/byte"),
        Cell("bits/byte − base", "95 % interval"),
        Cell("perplexity", "of a token"),
        Cell("bytes", "a token"),
        Cell("worst document", "nats lost against the base"),
        Cell("by base head", "of the tokens"),
        *([Cell("in its script", "letters after prompts, 95 %")] if with_script else []),
    ]
    of_base = {base.num_tokens: ("base", base)}
    for option, result in zip(options, results, strict=True):
        of_base.setdefault(result.num_tokens, (f"base, tokens of {option.run.name}", result))
    bases: dict[str, Row] = {}
    for label, result in of_base.values():
        difference = DASH if result is base else _difference(beside_base(options[0].untouched, result, "base"), digits)
        cells = _corpus_cells(result, "base", difference, base, with_script)
        bases[label] = [*cells[:4], DASH, DASH, *cells[6:]]
    title = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({meaning})"
    return _beside_base(title, titles, bases, options, rows)


def _corpus_cells(
    corpus: CorpusResult, head: str, difference: str | Cell, base: CorpusResult, with_script: bool
) -> list[str | Cell]:
    """Return a head's figures.

    Perplexity is of a token, and the worst document beside the base that reads the run's own: both compare with the
    others' where the tokens are the same.
    """
    result, alike = corpus.heads[head], corpus.num_tokens == base.num_tokens
    return [
        number(result.bits_per_byte),
        difference,
        perplexity(result.perplexity) if alike else DASH,
        number(corpus.bytes_per_token, 2),
        worst_document(result.worst_document_nats) if alike else DASH,
        DASH if result.base_share is None else percent(result.base_share),
        *([_share(result.in_script)] if with_script else []),
    ]


def _share(share: Interval | None) -> Cell:
    """Return a share in percent, with its interval; a dash where it was not measured, or is of nothing."""
    if share is None or share.value is None:
        return Cell(DASH)
    return Cell(percent(share.value), bounds(in_points(share), 1, ""))


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
    return _beside_base(title, titles, {"base": before}, options, rows)


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
    return _beside_base(title, titles, {"base": before}, options, rows)


def _points(share: Interval, sign: str = "", bounds_sign: str | None = None) -> Cell:
    """Return an accuracy in percent, or with signs a difference of two in points; with its interval if asked for."""
    points = in_points(share)
    return Cell(number(points.value, 1, sign), "" if bounds_sign is None else bounds(points, 1, bounds_sign))


def _beside_base(
    name: str,
    titles: Row,
    bases: Mapping[str, Row],
    options: Sequence[Option],
    rows: Sequence[Row],
) -> Table:
    """Return a table with the base's figures in its first rows, by label, and one row for every option."""
    labelled = [[label, *row] for label, row in bases.items()]
    labelled += [[option.label, *row] for option, row in zip(options, rows, strict=True)]
    methods = [*["base"] * len(bases), *(option.run.method.variant for option in options)]
    return Table(["method", *titles], labelled, "l" + "r" * len(titles), name, methods)
