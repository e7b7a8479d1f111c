"""report.md: the same tables and captions for a terminal, an issue or a repository."""

from __future__ import annotations

import re

from scale_cli.comparison.content import Comparison, figures, lead, notes, side_titles, table_caption
from scale_cli.comparison.options import Option, method_in_words
from scale_cli.comparison.words import percent, rate, short_bytes, short_count, signed, times_base, with_interval
from scale_cli.evaluation.render import language_name, number

# What Markdown, or the HTML in it, would read as more than text.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


def markdown(comparison: Comparison) -> str:
    """Return report.md, whose pictures lie beside it."""
    parts = ["# What each method buys, and what it costs", plain(lead(comparison))]
    if told := notes(comparison):
        parts.append("\n".join(f"- {plain(line)}" for line in told))
    parts += ["## Methods", _headline(comparison), plain(table_caption(comparison))]
    for figure in figures(comparison):
        parts.append(f"## {figure.title}")
        if figure.draw is not None:
            parts.append(f"![{figure.title}]({figure.key}.svg)")
        parts.append(plain(figure.caption))
    parts.append("## Every corpus")
    parts += [_corpus(comparison, index) for index in range(len(comparison.runs[0].report.corpora))]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", text)


def _headline(comparison: Comparison) -> str:
    lost, gained = side_titles(comparison)
    titles = [
        "method",
        "trained by",
        "served",
        f"{lost}, bits/byte [95 %]",
        f"{gained}, bits/byte [95 %]",
        "tokens served by base head",
        "weights held",
        "passes a token",
        "trainable parameters",
        "training tokens/s",
        "peak memory of training",
    ]
    best = comparison.best + comparison.best_in_one_model
    rows = [_row(titles), "|---|---|---|" + "---:|" * (len(titles) - 3)]
    rows += [_row(_headline_cells(option, option in best)) for option in comparison.options]
    return "\n".join(rows)


def _headline_cells(option: Option, is_best: bool) -> list[str]:
    differences = [
        plain(with_interval(side)) if side.value is not None else "—" for side in (option.lost, option.gained)
    ]
    cost = option.run.cost
    shares = ", ".join(f"{code} {percent(share)}" for code, share in (option.base_share or {}).items())
    return [
        plain(option.label),
        plain(method_in_words(option.run)),
        option.served,
        *(f"**{text}**" if is_best else text for text in differences),
        shares or "—",
        times_base(option.parameters, option.parameters_of_base) + (", two models" if option.num_models == 2 else ""),
        option.passes,
        short_count(cost and cost.trainable_parameters),
        rate(option.run.tokens_per_s),
        short_bytes(cost and cost.peak_memory_bytes),
    ]


def _corpus(comparison: Comparison, index: int) -> str:
    corpus = comparison.runs[0].report.corpora[index]
    base = corpus.heads["base"]
    rows = [
        f"### {plain(corpus.name)}: {language_name(corpus.language)}, {corpus.role}",
        "",
        _row(["method", "bits/byte", "bits/byte − base [95 %]", "perplexity", "worst document, nats", "by base head"]),
        "|---|" + "---:|" * 5,
        _row(["base", number(base.bits_per_byte), "—", number(base.perplexity, 2), "—", "—"]),
    ]
    for option in comparison.options:
        head = option.run.report.corpora[index].heads[option.head]
        difference = head.bits_per_byte_difference
        cells = [
            plain(option.label),
            number(head.bits_per_byte),
            plain(with_interval(difference)) if difference.value is not None else signed(None),
            number(head.perplexity, 2),
            number(head.worst_document_nats),
            "—" if head.base_share is None else percent(head.base_share),
        ]
        rows.append(_row(cells))
    return "\n".join(rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
