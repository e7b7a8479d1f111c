"""A forgetting report as text: what `scale evaluate` prints, report.md and report.html."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.results import (
    FIGURES,
    HEADS_AND_RULES,
    NOT_COVERED,
    ROLES,
    CorpusResult,
    HeadResult,
    LanguageAverage,
    Report,
)
from scale_cli.methods import METHODS
from scale_cli.report import (
    DASH,
    NO_DIFFERENCE,
    Cell,
    Row,
    Table,
    aligned,
    bounds,
    number,
    percent,
    render,
    verdict_of,
    with_interval,
    worst_document,
)
from scale_cli.values import counted, language_name

CURVE = "learning-curve.svg"
_RULES = ("posterior", "cosine")
_METRICS = {"acc": "accuracy", "acc_norm": "by length", "f1": "F1"}
_TITLES = {
    "base": "base",
    "trained": "trained",
    "posterior": "routed, posterior",
    "cosine": "routed, cosine",
}
_BENCHMARK = (
    "benchmark",
    "items",
    "metric",
    *_TITLES.values(),
    "served - base [95 %]",
    "items gained, lost",
    "",
)
_BETTER = {"retention": "kept and improved", "acquisition": "learned"}
_HEADS = {"trained": "the trained head"} | dict.fromkeys(_RULES, "the served, routed model")


@dataclass(frozen=True)
class History:
    """How a run went, as its page shows it."""

    curve: str = ""  # the learning curve, an SVG
    samples: Sequence[Table] = ()  # of every prompt: what the served head said on the way
    cost: Table | None = None


NO_HISTORY = History()


def terminal_lines(report: Report) -> list[str]:
    """Return what `scale evaluate` prints: the base's, the trained and the served head."""
    heads = list(dict.fromkeys(("base", "trained", report.served)))
    own_tokens = any(corpus.has_new_tokens for corpus in report.corpora)
    base = "base, its own tokens" if own_tokens else "base"
    names = [base, "trained", "routed"][: len(heads)]
    titles = ["", *names, f"{names[-1]} - base [95 %]", ""]
    corpora = report.by_role
    rows: list[Row] = []
    for role, language in dict.fromkeys((of.role_in_words, of.language) for of in corpora):
        rows.append([f"{language_name(language)}, {role}", *titles])
        for corpus in corpora:
            if (corpus.role_in_words, corpus.language) == (role, language):
                figures = [number(corpus.heads[head].bits_per_byte) for head in heads]
                difference = with_interval(corpus.heads[report.served].bits_per_byte_difference, 4)
                per_token = f"{corpus.bytes_per_token:.2f} bytes/token"
                rows.append([f"  {corpus.name}", "bits/byte", *figures, difference, per_token])
    num_texts = len(rows)
    for average in report.benchmark_averages:
        rows.append([f"{language_name(average.language)}, benchmarks", *titles])
        for name, _items, *measured, _changed, verdict in _benchmark_rows(
            report, average, heads, 4
        ):
            rows.append([f"  {name}", *measured, verdict])

    lines = aligned(rows, "ll" + "r" * len(heads) + "ll") if rows else []
    if report.corpora and report.served in _RULES:
        shares = report.base_share_by_language(report.served).items()
        listed = ", ".join(f"{percent(share)} of {language_name(code)}" for code, share in shares)
        lines.insert(num_texts, f"base head served {listed} tokens")
    return lines + [f"skipped {each.name}: {each.reason}" for each in report.skipped_benchmarks]


def _benchmark_rows(
    report: Report, average: LanguageAverage, heads: Sequence[str], digits: int
) -> list[Row]:
    """Return a row for each metric, and one for the average.

    Columns: benchmark, items, metric, each head, served - base, items gained and lost, verdict.
    """
    benchmarks = [b for b in report.benchmarks if b.language == average.language]
    rows: list[Row] = []
    for benchmark in benchmarks:
        served = benchmark.heads[report.served]
        for metric in benchmark.heads["base"].metrics:
            name = items = changed = verdict = ""
            if metric == benchmark.judged_by:
                name = benchmark.name
                items = f"{benchmark.num_items:,}"
                changed = "" if served.gained is None else f"{served.gained:,}, {served.lost:,}"
                verdict = verdict_of(served.p_holm)
            figures = [number(benchmark.heads[head].metrics[metric].value) for head in heads]
            difference = with_interval(served.differences[metric], digits)
            rows.append(
                [name, items, _METRICS.get(metric, metric), *figures, difference, changed, verdict]
            )
    if len(benchmarks) > 1:
        named = _METRICS["acc"] if {b.judged_by for b in benchmarks} == {"acc"} else "first metrics"
        figures = [number(average.acc[head].value) for head in heads]
        difference = with_interval(average.acc_difference[report.served], digits)
        rows.append([Cell("average", bold=True), "", named, *figures, difference, "", ""])
    return rows


def page(report: Report, config: RunConfig, form: str, history: History = NO_HISTORY) -> str:
    """Return a report as a page, `md` or `html`.

    HTML needs no other file. Beside Markdown lies CURVE.
    """
    corpora = report.by_role
    shares = [report.base_share_by_language(rule) for rule in report.rules]
    languages = dict.fromkeys(corpus.language for corpus in report.corpora)
    share_rows: list[Row] = [
        [language_name(code), *(percent(of_rule[code]) for of_rule in shares)] for code in languages
    ]
    benchmarks = []
    for average in report.benchmark_averages:
        rows = _benchmark_rows(report, average, HEADS_AND_RULES, 3)
        benchmarks.append((language_name(average.language), Table(_BENCHMARK, rows, "lrlrrrrrrl")))
    served = f"both heads, routed by the {report.served} rule"
    return render(
        f"evaluation.{form}.j2",
        report=report,
        headline=" ".join(headline(report)),
        run=config.output_dir.name,
        base=config.model.base,
        trained_by=_trained_by(report, config),
        served="the trained head" if report.served == "trained" else served,
        has_new_tokens=any(corpus.has_new_tokens for corpus in corpora),
        meanings=ROLES,
        corpora=[(corpus, _corpus_table(corpus, report.served)) for corpus in corpora],
        benchmarks=benchmarks,
        shares=Table(["language", *report.rules], share_rows, "l" + "r" * len(shares)),
        bound=-math.log(config.method.rules.prior),
        prior=f"{config.method.rules.prior:g}",
        script_prior=config.script_prior if report.served == "posterior" else None,
        threshold=f"{config.method.rules.threshold:g}",
        not_covered=NOT_COVERED,
        CURVE=CURVE,
        **vars(history),
    )


def _trained_by(report: Report, config: RunConfig) -> str:
    method = METHODS[report.variant]
    if not method.trains:
        note = f" ({report.note})" if report.note else ""
        return f"beside it {config.method.model}, which others trained{note}"
    tokens = f"{report.num_tokens_trained:,} tokens"
    return f"trained by {method.label}, {counted(report.step, 'step')}, {tokens}"


def failures(report: Report) -> list[str]:
    """Return a sentence for each corpus that the trained or the served head failed on."""
    heads = dict.fromkeys(("trained", report.served))
    return [_failure(corpus, heads) for corpus in report.by_role if any(map(corpus.failed, heads))]


def headline(report: Report) -> list[str]:
    """Return a sentence for each corpus: what failed comes first."""
    heads = ("trained", report.served)
    others = [of for of in report.by_role if not any(map(of.failed, heads))]
    return failures(report) + [_became(corpus, report) for corpus in others]


def _failure(corpus: CorpusResult, heads: Iterable[str]) -> str:
    """Return a sentence: what became of the trained and the served head."""
    if corpus.heads["base"].bits_per_byte is None:
        return f"{_named(corpus)} failed: the loss of the base is not finite."
    before = number(corpus.heads["base"].bits_per_byte)
    told = []
    for head in heads:
        difference = corpus.heads[head].bits_per_byte_difference
        became = f"{before} to {number(corpus.heads[head].bits_per_byte)} bits/byte"
        if not difference.ends:
            told.append(f"the loss of {_HEADS[head]} is not finite")
        elif corpus.failed(head):
            interval = with_interval(difference, 4)
            told.append(f"{_HEADS[head]} is worse than the base, {became} ({interval})")
        else:
            told.append(f"{_HEADS[head]} went from {became}")
    failed = "was not learned" if corpus.role == "acquisition" else "failed"
    return f"{_named(corpus)} {failed}: {'; '.join(told)}."


def _became(corpus: CorpusResult, report: Report) -> str:
    """Return a sentence: what was served on a corpus, before and after, and a verdict."""
    served = report.served
    difference = corpus.heads[served].bits_per_byte_difference
    before = number(corpus.heads["base"].bits_per_byte)
    after = number(corpus.heads[served].bits_per_byte)
    if min(difference.ends) <= 0 <= max(difference.ends):
        verdict = NO_DIFFERENCE
    elif before == after:
        verdict = "the same to three digits"
    elif max(difference.ends) > 0:
        most = worst_document(corpus.heads[served].worst_document_nats).removeprefix("+")
        verdict = f"worse than the base, by at most {most} nats in a document"
    elif corpus.shared:
        verdict = "better, on text that was also trained on"
    elif not bounds(difference):
        verdict = "better, without an interval"
    elif not report.searched_training_text:
        verdict = "better; the training text is gone, so nobody looked whether it holds this text"
    else:
        verdict = _BETTER[corpus.role]
    return f"{_named(corpus)} went from {before} to {after} bits/byte: {verdict}."


def _named(corpus: CorpusResult) -> str:
    also = corpus.role_in_words.removeprefix(corpus.role)
    return f"{language_name(corpus.language)} ({corpus.name}{also})"


def _corpus_table(corpus: CorpusResult, served: str) -> Table:
    """Return every head's figures; if the run has new tokens, without figures per token."""
    figures = [figure for figure in FIGURES if not (figure.per_token and corpus.has_new_tokens)]
    heads: list[tuple[Cell, HeadResult]] = []
    for head, result in corpus.heads.items():
        is_served = head == served
        heads.append((Cell(_TITLES[head], "served" if is_served else "", is_served), result))
    if corpus.base_of_new_tokens is not None:
        heads[0] = Cell("base", "by its own tokens"), corpus.heads["base"]
        heads.append(
            (Cell("base", "by the run's tokens, in the router"), corpus.base_of_new_tokens)
        )

    rows: list[Row] = []
    for title, result in heads:
        is_base = result is corpus.heads["base"]
        rows.append(
            [title, *(DASH if is_base and not f.of_base else f.cell(result) for f in figures)]
        )
    titles: Row = ["head", *(Cell(figure.title, figure.subtitle) for figure in figures)]
    return Table(titles, rows, "l" + "r" * len(figures)).without_empty_columns()
