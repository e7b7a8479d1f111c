"""report.md: the same tables and captions for a terminal, an issue or a repository."""

from __future__ import annotations

import re

from scale_cli.comparison.content import Comparison, figures, lead, notes, side_titles, table_caption
from scale_cli.comparison.options import Option
from scale_cli.comparison.tables import Table, benchmark_tables, corpus_tables
from scale_cli.comparison.words import percent, rate, short_bytes, short_count, times_base, with_interval
from scale_cli.config.method_names import method_in_words

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
    for title, tables in (
        ("Every corpus", corpus_tables(comparison.options)),
        ("Every benchmark", benchmark_tables(comparison.options)),
    ):
        if tables:
            parts += [f"## {title}", *(_table(table) for table in tables)]
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
    differences = [plain(with_interval(side)) for side in (option.lost, option.gained)]
    shares = ", ".join(f"{code} {percent(share)}" for code, share in (option.base_share or {}).items())
    return [
        plain(option.label),
        plain(method_in_words(option.run.method)),
        option.served,
        *(f"**{text}**" if is_best else text for text in differences),
        shares or "—",
        times_base(option.parameters, option.parameters_of_base) + (", two models" if option.num_models == 2 else ""),
        option.passes,
        short_count(option.run.trainable_parameters),
        rate(option.run.tokens_per_s),
        short_bytes(option.run.peak_memory_bytes),
    ]


def _table(table: Table) -> str:
    rows = [
        f"### {plain(table.title)}",
        "",
        _row(["method", *(plain(f"{title}, {unit}" if unit else title) for title, unit in table.columns)]),
        "|---|" + "---:|" * len(table.columns),
    ]
    for row in table.rows:
        cells = (plain(f"{main} {below}" if below else main) for main, below in row.cells)
        rows.append(_row([plain(row.label), *cells]))
    return "\n".join(rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
