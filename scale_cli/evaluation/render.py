"""A report as text: the lines `scale evaluate` prints, and report.md."""

from __future__ import annotations

from scale_cli.config.method_names import method_name
from scale_cli.config.schema import RouterConfig
from scale_cli.evaluation.guarantee import NOT_COVERED, bound_nats
from scale_cli.evaluation.results import HEADS, BenchmarkHead, BenchmarkResult, CorpusResult, Report
from scale_cli.evaluation.statistics import Interval

_LANGUAGES = {"en": "English", "ko": "Korean", "de": "German", "fr": "French", "ja": "Japanese", "zh": "Chinese"}
_RULES = ("posterior", "cosine")
_METRICS = {"acc": "accuracy", "acc_norm": "by length", "macro_f1": "macro-F1"}
# Holm-adjusted p-values from here on show nothing.
SIGNIFICANCE = 0.05
# Beyond these, digits are noise: of a perplexity, and of nats lost by one document.
_LARGE, _LONG_DOCUMENT = 1e6, 100.0
_LEAST_SHOWN = 0.0005
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def language_name(code: str) -> str:
    """Return a language's English name, or its code."""
    return _LANGUAGES.get(code, code)


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure, or what it is instead of one."""
    return "not finite" if value is None else f"{value:.{digits}f}"


def perplexity(value: float | None) -> str:
    """Return a perplexity, which has no upper end, with as many digits as can be read."""
    if value is None:
        return "not finite"
    if value < _LARGE:
        return f"{value:,.2f}"
    digits, exponent = f"{value:.1e}".split("e+")
    return f"{digits} × 10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def worst_document(value: float | None) -> str:
    """Return the most that a document lost, in nats; below zero none lost, and it is the least that one gained."""
    if value is None:
        return "not finite"
    size = f"{abs(value):,.3f}" if abs(value) < _LONG_DOCUMENT else f"{abs(value):,.0f}"
    return size if value > -_LEAST_SHOWN else f"none lost, least gain {size}"


def signed(interval: Interval, digits: int = 3) -> str:
    """Return a difference with its interval: +0.001 [+0.001, +0.002]."""
    if interval.value is None:
        return "not finite"
    if interval.low is None or interval.high is None:
        return f"{interval.value:+.{digits}f}"
    return f"{interval.value:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def served_column(report: Report) -> str:
    """Return what the served head is called in a table."""
    return {"adapted": "adapted", "posterior": "routed", "cosine": "routed"}[report.served]


def terminal_lines(report: Report) -> list[str]:
    """Return what `scale evaluate` prints: the base, the adaptation head and what is served, on text and benchmarks."""
    names = [corpus.name for corpus in report.corpora] + [benchmark.name for benchmark in report.benchmarks]
    width = max([12, *map(len, names)])
    lines = _corpus_lines(report, width)
    if report.corpora and report.served in _RULES:
        shares = report.base_share_by_language(report.served)
        told = ", ".join(f"{100 * share:.1f} % of {language_name(code)}" for code, share in shares.items())
        lines.append(f"base head served {told} tokens")
    lines.extend(_benchmark_lines(report, width))
    lines.extend(f"skipped {skipped.name}: {skipped.reason}" for skipped in report.skipped_benchmarks)
    return lines


def _corpus_lines(report: Report, width: int) -> list[str]:
    lines = []
    for role in ("retention", "acquisition"):
        for language in dict.fromkeys(corpus.language for corpus in report.with_role(role)):
            lines.append(_title(report, f"{language_name(language)}, {role}", width))
            for corpus in report.with_role(role):
                if corpus.language == language:
                    values = [corpus.heads[head].bits_per_byte for head in _heads_shown(report)]
                    difference = corpus.heads[report.served].bits_per_byte_difference
                    lines.append(_line(corpus.name, width, "bits/byte", values, difference))
    return lines


def _benchmark_lines(report: Report, width: int) -> list[str]:
    lines = []
    for average in report.benchmark_averages:
        lines.append(_title(report, f"{language_name(average.language)}, benchmarks", width))
        for benchmark in report.benchmarks:
            if benchmark.language != average.language:
                continue
            for metric in _metrics(benchmark):
                values = [benchmark.heads[head].metrics[metric].value for head in _heads_shown(report)]
                served = benchmark.heads[report.served]
                said = f"  {verdict(served)}" if metric == "acc" else ""
                lines.append(_line(benchmark.name, width, _METRICS[metric], values, served.differences[metric]) + said)
        if average.num_benchmarks > 1:
            values = [average.acc[head].value for head in _heads_shown(report)]
            lines.append(_line("average", width, _METRICS["acc"], values, average.acc_difference[report.served]))
    return lines


def _title(report: Report, title: str, width: int) -> str:
    served = served_column(report)
    columns = ["base", "adapted"] + (["routed"] if served == "routed" else [])
    return f"{title:<{width + 14}}" + "".join(f"{name:>10}" for name in columns) + f"   {served} - base [95 %]"


def _line(name: str, width: int, unit: str, values: list[float | None], difference: Interval) -> str:
    figures = "".join(f"{number(value):>10}" for value in values)
    return f"  {name:<{width}}  {unit:<10}{figures}   {signed(difference, 4)}"


def _heads_shown(report: Report) -> list[str]:
    return ["base", "adapted"] + ([] if report.served == "adapted" else [report.served])


def _metrics(benchmark: BenchmarkResult) -> list[str]:
    return [metric for metric in _METRICS if metric in benchmark.heads["base"].metrics]


def verdict(head: BenchmarkHead) -> str:
    """Return what may be said of a difference in accuracy once all benchmarks are corrected for."""
    if head.p_holm is None:
        return ""
    if head.p_holm >= SIGNIFICANCE:
        return "no difference shown"
    return "p < 0.001" if head.p_holm < 0.001 else f"p = {head.p_holm:.3f}"


def markdown(report: Report, router: RouterConfig, picture: str | None) -> str:
    """Return report.md.

    Args:
        report: what was measured.
        router: that it was measured under.
        picture: name of a file beside it; None where there is none.
    """
    parts = [
        "# Forgetting report",
        f"Trained by {method_name(report.variant)}: {report.step:,} steps, {report.num_tokens_trained:,} tokens. "
        f"Served: {_describe(report.served)}.",
    ]
    if picture is not None:
        parts.append(f"![What was lost against what was gained]({picture})")
    for role, meaning in (("retention", "what the base knew"), ("acquisition", "what it was taught")):
        for corpus in report.with_role(role):
            parts.append(f"## {corpus.name}: {language_name(corpus.language)}, {role} ({meaning})")
            parts.append(
                f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, {corpus.num_bytes:,} bytes."
            )
            parts.append(_corpus_table(corpus, report.served))
    parts.extend(_benchmark_parts(report))
    if not report.corpora:
        return "\n\n".join(parts) + "\n"
    parts.append("## Tokens served by the base head")
    parts.append(_share_table(report))
    parts.append(
        "Differences are from the base head; intervals are paired bootstrap, 95 %, over documents. "
        "*Worst document* is the most that any one document lost against the base head, in nats over the whole "
        f"document{_bound(router)}"
    )
    return "\n\n".join(parts) + "\n"


def _bound(router: RouterConfig) -> str:
    bound = bound_nats(router.prior, router.switch_rate)
    if bound is None:
        return "."
    figure = f"{bound:.3f} at most (-ln of the base head's prior, {router.prior:g})"
    return f"; under the posterior rule {figure}. {NOT_COVERED}"


def _benchmark_parts(report: Report) -> list[str]:
    parts = []
    for average in report.benchmark_averages:
        parts.append(f"## Benchmarks: {language_name(average.language)}")
        benchmarks = [benchmark for benchmark in report.benchmarks if benchmark.language == average.language]
        rows = [
            "| benchmark | items | metric | base | adapted | routed, posterior | routed, cosine "
            "| served - base [95 %] | items gained, lost | |",
            "|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        for benchmark in benchmarks:
            rows.extend(_benchmark_rows(benchmark, report.served))
        if len(benchmarks) > 1:
            figures = [number(average.acc[head].value) for head in HEADS]
            difference = signed(average.acc_difference[report.served])
            rows.append("| " + " | ".join(["**average**", "", _METRICS["acc"], *figures, difference, "", ""]) + " |")
        parts.append("\n".join(rows))
    if parts:
        parts.append(
            "Scored by lm-eval; intervals are paired bootstrap, 95 %, over items. The last column is McNemar's exact "
            "test of what is served against the base head, adjusted by Holm's method over all benchmarks here. "
            "*No difference shown* is not *no difference*: the interval says how large one might be. The router has "
            "seen the context too, as it has when the model is served."
        )
    if report.skipped_benchmarks:
        skipped = [f"- {skipped.name}: {skipped.reason}" for skipped in report.skipped_benchmarks]
        parts.append("\n".join(["Not measured:", "", *skipped]))
    return parts


def _benchmark_rows(benchmark: BenchmarkResult, served: str) -> list[str]:
    rows, head = [], benchmark.heads[served]
    for metric in _metrics(benchmark):
        figures = [number(benchmark.heads[name].metrics[metric].value) for name in HEADS]
        told = ["", ""]
        if metric == "acc":
            told = ["" if head.gained is None else f"{head.gained:,}, {head.lost:,}", verdict(head)]
        first = [benchmark.name, f"{benchmark.num_items:,}"] if metric == "acc" else ["", ""]
        cells = [*first, _METRICS[metric], *figures, signed(head.differences[metric]), *told]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _describe(head: str) -> str:
    if head == "adapted":
        return "the adaptation head"
    return f"both heads, routed by the {head} rule"


def _corpus_table(corpus: CorpusResult, served: str) -> str:
    rows = [
        "| head | nats/token | perplexity | bits/byte | bits/byte - base [95 %] | nats/token - base [95 %] "
        "| worst document, nats |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in HEADS:
        head = corpus.heads[name]
        title = {"posterior": "routed, posterior", "cosine": "routed, cosine"}.get(name, name)
        title = f"**{title}** (served)" if name == served else title
        differences = ("", "", "")
        if name != "base":
            differences = (
                signed(head.bits_per_byte_difference, 4),
                signed(head.nats_per_token_difference, 4),
                worst_document(head.worst_document_nats),
            )
        cells = [title, number(head.nats_per_token, 4), perplexity(head.perplexity), number(head.bits_per_byte)]
        rows.append("| " + " | ".join([*cells, *differences]) + " |")
    return "\n".join(rows)


def _share_table(report: Report) -> str:
    rows = ["| language | posterior | cosine |", "|---|---:|---:|"]
    shares = {rule: report.base_share_by_language(rule) for rule in _RULES}
    for code in shares["posterior"]:
        cells = " | ".join(f"{100 * shares[rule][code]:.1f} %" for rule in _RULES)
        rows.append(f"| {language_name(code)} | {cells} |")
    return "\n".join(rows)
