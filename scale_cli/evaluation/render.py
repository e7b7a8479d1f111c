"""A report as text: the lines `scale evaluate` prints, and report.md."""

from __future__ import annotations

from scale_cli.evaluation.results import HEADS, CorpusResult, Report
from scale_cli.evaluation.statistics import Interval

_LANGUAGES = {"en": "English", "ko": "Korean", "de": "German", "fr": "French", "ja": "Japanese", "zh": "Chinese"}
_RULES = ("posterior", "cosine")


def language_name(code: str) -> str:
    """Return a language's English name, or its code."""
    return _LANGUAGES.get(code, code)


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure, or what it is instead of one."""
    return "not finite" if value is None else f"{value:.{digits}f}"


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
    """Return the table that `scale evaluate` prints: bits per byte of the base, the adaptation head, what is served."""
    served = served_column(report)
    heads = ["base", "adapted"] + ([report.served] if served == "routed" else [])
    columns = ["base", "adapted"] + (["routed"] if served == "routed" else [])
    lines = []
    width = max(12, *(len(corpus.name) for corpus in report.corpora))
    for role in ("retention", "acquisition"):
        for language in dict.fromkeys(corpus.language for corpus in report.with_role(role)):
            title = f"{language_name(language)}, {role}"
            lines.append(
                f"{title:<{width + 14}}" + "".join(f"{name:>10}" for name in columns) + f"   {served} - base [95 %]"
            )
            for corpus in report.with_role(role):
                if corpus.language == language:
                    figures = "".join(f"{number(corpus.heads[head].bits_per_byte):>10}" for head in heads)
                    difference = signed(corpus.heads[report.served].bits_per_byte_difference, 4)
                    lines.append(f"  {corpus.name:<{width}}  {'bits/byte':<10}{figures}   {difference}")
    if served == "routed":
        shares = report.base_share_by_language(report.served)
        told = ", ".join(f"{100 * share:.1f} % of {language_name(code)}" for code, share in shares.items())
        lines.append(f"base head served {told} tokens")
    return lines


def markdown(report: Report, picture: str | None) -> str:
    """Return report.md, with a picture of that name where there is one."""
    parts = [
        "# Forgetting report",
        f"SCALE-{report.variant.capitalize()}, {report.step:,} steps, {report.num_tokens_trained:,} training tokens. "
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
    parts.append("## Tokens served by the base head")
    parts.append(_share_table(report))
    parts.append(
        "Differences are from the base head; intervals are paired bootstrap, 95 %, over documents. "
        "*Worst document* is the most that any one document lost against the base head, in nats over the whole "
        "document; under the posterior rule with prior 1/2 and no switching it cannot exceed ln 2 = 0.693."
    )
    return "\n\n".join(parts) + "\n"


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
                signed(head.bits_per_byte_difference),
                signed(head.nats_per_token_difference),
                number(head.worst_document_nats),
            )
        cells = [title, number(head.nats_per_token, 4), number(head.perplexity, 2), number(head.bits_per_byte)]
        rows.append("| " + " | ".join([*cells, *differences]) + " |")
    return "\n".join(rows)


def _share_table(report: Report) -> str:
    rows = ["| language | posterior | cosine |", "|---|---:|---:|"]
    shares = {rule: report.base_share_by_language(rule) for rule in _RULES}
    for code in shares["posterior"]:
        cells = " | ".join(f"{100 * shares[rule][code]:.1f} %" for rule in _RULES)
        rows.append(f"| {language_name(code)} | {cells} |")
    return "\n".join(rows)
