"""A forgetting report to read: the lines `scale evaluate` prints, report.md, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from markupsafe import Markup

from scale_cli.config.display_names import language_name, method_name
from scale_cli.config.schema import MethodConfig
from scale_cli.evaluation.guarantee import NOT_COVERED, bound_nats
from scale_cli.evaluation.results import (
    HEADS,
    ROLES,
    BenchmarkHead,
    BenchmarkResult,
    CorpusResult,
    HeadResult,
    LanguageAverage,
    Report,
)
from scale_cli.report import pages
from scale_cli.report.figures import LIGHT, TradeOffPoint, draw_points, panel, set_size
from scale_cli.report.numbers import (
    DASH,
    NO_DIFFERENCE,
    number,
    p_value,
    percent,
    perplexity,
    shows_difference,
    with_interval,
    worst_document,
)
from scale_cli.report.tables import Column, Table, aligned, share_cell

_PANEL_WIDTH = 390.0
_RULES = ("posterior", "cosine")
_METRICS = {"acc": "accuracy", "acc_norm": "by length", "macro_f1": "macro-F1"}
_TITLES = {"base": "base", "adapted": "trained", "posterior": "routed, posterior", "cosine": "routed, cosine"}
# Of each head in the picture: colour and mark.
_MARKS = {"base": ("base", "o"), "adapted": ("full", "s"), "posterior": ("route", "D"), "cosine": ("adapt", "^")}


def terminal_lines(report: Report) -> list[str]:
    """Return what `scale evaluate` prints: the base, the trained head and what is served, on text and benchmarks."""
    rows = [*_corpus_rows(report), *_benchmark_rows(report)]
    heads = _heads_shown(report)
    aligned_rows = aligned(rows, "ll" + "r" * len(heads) + "ll") if rows else []
    num_of_corpora = len(_corpus_rows(report))
    lines = aligned_rows[:num_of_corpora]
    if report.corpora and report.served in _RULES:
        shares = report.base_share_by_language(report.served)
        listed = ", ".join(f"{percent(share)} of {language_name(code)}" for code, share in shares.items())
        lines.append(f"base head served {listed} tokens")
    return [
        *lines,
        *aligned_rows[num_of_corpora:],
        *(f"skipped {skipped.name}: {skipped.reason}" for skipped in report.skipped_benchmarks),
    ]


def _heads_shown(report: Report) -> list[str]:
    return ["base", "adapted"] + ([] if report.served == "adapted" else [report.served])


def _title_row(report: Report, title: str) -> list[str]:
    names = ["base", "trained", "routed"][: len(_heads_shown(report))]
    return [title, "", *names, f"{names[-1]} - base [95 %]", ""]


def _corpus_rows(report: Report) -> list[list[str]]:
    rows = []
    for role in ROLES:
        for language in dict.fromkeys(corpus.language for corpus in report.with_role(role)):
            rows.append(_title_row(report, f"{language_name(language)}, {role}"))
            for corpus in report.with_role(role):
                if corpus.language == language:
                    figures = [number(corpus.heads[head].bits_per_byte) for head in _heads_shown(report)]
                    difference = with_interval(corpus.heads[report.served].bits_per_byte_difference, 4)
                    per_token = f"{corpus.bytes_per_token:.2f} bytes/token"
                    rows.append([f"  {corpus.name}", "bits/byte", *figures, difference, per_token])
                    if corpus.num_prompts:
                        shares = [corpus.heads[head].in_script for head in _heads_shown(report)]
                        shown = [
                            DASH if share is None or share.value is None else percent(share.value) for share in shares
                        ]
                        rows.append(["", "in its script", *shown, "", f"letters after {corpus.num_prompts:,} prompts"])
    return rows


def _benchmark_rows(report: Report) -> list[list[str]]:
    rows = []
    for average in report.benchmark_averages:
        rows.append(_title_row(report, f"{language_name(average.language)}, benchmarks"))
        for benchmark in _of_language(report, average):
            for metric in _metrics(benchmark):
                figures = [number(benchmark.heads[head].metrics[metric].value) for head in _heads_shown(report)]
                served = benchmark.heads[report.served]
                difference = with_interval(served.differences[metric], 4)
                said = _verdict(served) if metric == benchmark.judged_by else ""
                rows.append([f"  {benchmark.name}", _METRICS.get(metric, metric), *figures, difference, said])
        if average.num_benchmarks > 1:
            figures = [number(average.acc[head].value) for head in _heads_shown(report)]
            difference = with_interval(average.acc_difference[report.served], 4)
            rows.append(["  average", _average_of(report, average), *figures, difference, ""])
    return rows


def _of_language(report: Report, average: LanguageAverage) -> list[BenchmarkResult]:
    return [benchmark for benchmark in report.benchmarks if benchmark.language == average.language]


def _metrics(benchmark: BenchmarkResult) -> list[str]:
    return list(benchmark.heads["base"].metrics)


def _average_of(report: Report, average: LanguageAverage) -> str:
    judged_by = {benchmark.judged_by for benchmark in _of_language(report, average)}
    return _METRICS["acc"] if judged_by == {"acc"} else "first metrics"


def _verdict(head: BenchmarkHead) -> str:
    """Return what may be said of a difference in accuracy once all benchmarks are corrected for."""
    if head.p_holm is None:
        return ""
    return p_value(head.p_holm) if shows_difference(head.p_holm) else NO_DIFFERENCE


def markdown(report: Report, method: MethodConfig, picture: str | None) -> str:
    """Return report.md; its picture is a file beside it, where there is one."""
    served = "the trained head" if report.served == "adapted" else f"both heads, routed by the {report.served} rule"
    shares = {rule: report.base_share_by_language(rule) for rule in _RULES}
    router, has_own_tokens = method.router, method.vocabulary is not None
    return pages.markdown(
        "evaluation.md.j2",
        report=report,
        trained_by=method_name(report.variant),
        served=served,
        picture=picture,
        has_own_tokens=has_own_tokens,
        corpora=[
            (
                corpus,
                language_name(corpus.language),
                meaning,
                _corpus_table(corpus, report.served, has_own_tokens).markdown(),
            )
            for role, meaning in ROLES.items()
            for corpus in report.with_role(role)
        ],
        benchmarks=[
            (language_name(average.language), _benchmark_table(report, average).markdown())
            for average in report.benchmark_averages
        ],
        shares=Table(
            ["language", *_RULES],
            [[language_name(code), *(percent(shares[rule][code]) for rule in _RULES)] for code in shares["posterior"]],
            "lrr",
        ).markdown(),
        bound=bound_nats(router.prior, router.switch_rate),
        prior=f"{router.prior:g}",
        not_covered=NOT_COVERED,
    )


def _corpus_table(corpus: CorpusResult, served: str, has_own_tokens: bool) -> Table:
    """Return every head's figures; of tokens that no other run has, those alone that compare."""

    def beside_base(figure: Callable[[HeadResult], str]) -> Callable[[str], str]:
        return lambda head: "" if head == "base" else figure(corpus.heads[head])

    per_token: list[Column[str]] = [
        Column("nats/token", lambda head: number(corpus.heads[head].nats_per_token, 4)),
        Column("perplexity", lambda head: perplexity(corpus.heads[head].perplexity)),
    ]
    difference_per_token = Column(
        "nats/token - base [95 %]", beside_base(lambda result: with_interval(result.nats_per_token_difference, 4))
    )
    in_script: Column[str] = Column(
        "letters in the prompt's script [95 %]", lambda head: share_cell(corpus.heads[head].in_script)
    )
    columns: list[Column[str]] = [
        Column("head", lambda head: Markup(f"**{_TITLES[head]}** (served)") if head == served else _TITLES[head], "l"),
        *([] if has_own_tokens else per_token),
        Column("bits/byte", lambda head: number(corpus.heads[head].bits_per_byte)),
        Column(
            "bits/byte - base [95 %]", beside_base(lambda result: with_interval(result.bits_per_byte_difference, 4))
        ),
        *([] if has_own_tokens else [difference_per_token]),
        Column("worst document, nats", beside_base(lambda result: worst_document(result.worst_document_nats))),
        *([in_script] if corpus.num_prompts else []),
    ]
    return Table.of(columns, HEADS)


def _benchmark_table(report: Report, average: LanguageAverage) -> Table:
    titles = ["benchmark", "items", "metric", *_TITLES.values(), "served - base [95 %]", "items gained, lost", ""]
    benchmarks, rows = _of_language(report, average), []
    for benchmark in benchmarks:
        head = benchmark.heads[report.served]
        for metric in _metrics(benchmark):
            figures = [number(benchmark.heads[name].metrics[metric].value) for name in HEADS]
            first, last = ["", ""], ["", ""]
            if metric == benchmark.judged_by:
                first = [benchmark.name, f"{benchmark.num_items:,}"]
                last = ["" if head.gained is None else f"{head.gained:,}, {head.lost:,}", _verdict(head)]
            rows.append(
                [*first, _METRICS.get(metric, metric), *figures, with_interval(head.differences[metric]), *last]
            )
    if len(benchmarks) > 1:
        figures = [number(average.acc[head].value) for head in HEADS]
        difference = with_interval(average.acc_difference[report.served])
        rows.append([Markup("**average**"), "", _average_of(report, average), *figures, difference, "", ""])
    return Table(titles, rows, "lrlrrrrrrl")


def draw_trade_off(figure: Any, report: Report) -> None:
    """Draw what was lost against what was gained: a panel for each pair of corpora (there is one) of the two roles."""
    pairs = list(product(report.with_role("retention"), report.with_role("acquisition")))
    columns = min(3, len(pairs))
    wide, high = _PANEL_WIDTH, 310.0
    set_size(figure, wide * columns, 50 + high * -(-len(pairs) // columns))
    name = method_name(report.variant)
    figure.suptitle(f"{name[0].upper()}{name[1:]}\nlost and gained against the base, with 95 % intervals", size=11)
    for index, (kept, taught) in enumerate(pairs):
        left, top = index % columns * wide, 50 + index // columns * high
        axes = panel(figure, left + 70, top + 8, left + wide - 12, top + high - 62)
        axes.axhline(0.0, color=LIGHT["axis"], linewidth=0.8, zorder=0)
        axes.axvline(0.0, color=LIGHT["axis"], linewidth=0.8, zorder=0)
        draw_points(axes, _points(kept, taught))
        axes.set_xlabel(f"{language_name(kept.language)} lost ({kept.name}),\nbits/byte")
        axes.set_ylabel(f"{language_name(taught.language)} gained ({taught.name}),\nbits/byte")
        axes.locator_params(nbins=5)
        axes.margins(0.15)
    figure.axes[0].legend(fontsize=9, loc="best")


def _points(kept: CorpusResult, taught: CorpusResult) -> Sequence[TradeOffPoint]:
    points = []
    for head, (colour, marker) in _MARKS.items():
        lost, change = (corpus.heads[head].bits_per_byte_difference for corpus in (kept, taught))
        if lost.value is not None and change.value is not None:
            label = "trained head" if head == "adapted" else _TITLES[head]
            points.append(TradeOffPoint(label, colour, marker, lost, -change, filled=head != "base"))
    return points
