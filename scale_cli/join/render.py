"""The figures of a joined model as a table, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.join.scoring import HeadFigures, JoinedCorpus


def table_lines(corpora: Sequence[JoinedCorpus], max_cost_nats: float | None) -> list[str]:
    """Return aligned lines: of every corpus all heads and the router, in both units, and what routing cost at most."""
    titles = ["", "", *corpora[0].heads, "routed", "worst document"]
    rows = [row for corpus in corpora for row in _rows(corpus)]
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [titles, *rows]
    ]
    return [*lines, _bound(max_cost_nats)]


def figures_table(corpora: Sequence[JoinedCorpus], max_cost_nats: float | None) -> str:
    """Return the same in Markdown."""
    titles = ["corpus", "", *corpora[0].heads, "routed", "worst document"]
    rows = [["---", "---", *["---:"] * (len(titles) - 2)], *(row for corpus in corpora for row in _rows(corpus))]
    lines = ["| " + " | ".join(row) + " |" for row in [titles, *rows]]
    return "\n".join([*lines, "", _bound(max_cost_nats)])


def _rows(corpus: JoinedCorpus) -> list[list[str]]:
    heads = [*corpus.heads.values(), corpus.routed]

    def row(name: str, unit: str, cells: list[str], last: str = "") -> list[str]:
        return [name, unit, *cells, last]

    return [
        row(
            f"{corpus.name} ({corpus.language})",
            "nats/token",
            [_figure(head.nats_per_token) for head in heads],
            f"{_figure(corpus.worst_document_nats, signed=True)} nats",
        ),
        row("", "bits/byte", [_figure(head.bits_per_byte) for head in heads]),
        row("", "served", [_share(head) for head in heads]),
    ]


def _figure(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "not finite"
    return f"{value:+.3f}" if signed else f"{value:.4f}"


def _share(head: HeadFigures) -> str:
    return "" if head.share is None else f"{head.share:.1%}"


def _bound(max_cost_nats: float | None) -> str:
    if max_cost_nats is None:
        return "worst document: routed - best head; no bound holds with a switch rate"
    return f"worst document: routed - best head, in nats; {max_cost_nats:.3f} at most, whatever was trained"
