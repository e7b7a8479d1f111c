"""Tables as lines for a terminal, as Markdown, or (by templates/table.html.j2) as HTML; pages and cards from templates.

In a template a value is text: markup in a name of a run or a file stays text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from scale_cli.report.numbers import DASH, Interval, bounds, in_points, number, percent

# What Markdown, or the HTML in it, reads as more than text. A bracket alone is none of it, nor a line within a word:
# [+0.1, +0.2] and kobest_copa stay.
_SPECIAL = re.compile(r"([\\`*{}<>#|]|!(?=\[)|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_]))")


@dataclass(frozen=True)
class Cell:
    """Words or a figure."""

    text: str
    below: str = ""  # stands small beneath it, or after it
    bold: bool = False

    @property
    def after(self) -> str:
        """What stands after it on one line: an interval as it is, anything else behind a comma."""
        return f"{' ' if self.below.startswith('[') else ', '}{self.below}" if self.below else ""

    def __str__(self) -> str:
        return self.text + self.after


def difference_cell(difference: Interval) -> Cell:
    return Cell(number(difference.value, 4, "+"), bounds(difference, 4))


def share_cell(share: Interval | None) -> Cell:
    """Return a share in percent with its interval: 98.2 % [96.1, 99.5]; a dash where it is of nothing."""
    if share is None or share.value is None:
        return Cell(DASH)
    return Cell(percent(share.value), bounds(in_points(share), 1, ""))


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under their titles."""

    titles: Row
    rows: Sequence[Row]
    align: str  # of every column: l (words) or r (figures)
    name: str = ""
    methods: Sequence[str] = ()  # by row: whose mark stands before it on a page

    def without_empty_columns(self) -> Table:
        kept = [at for at in range(len(self.titles)) if any(str(row[at]) != DASH for row in self.rows)]
        titles, *rows = ([row[at] for at in kept] for row in (self.titles, *self.rows))
        return replace(self, titles=titles, rows=rows, align="".join(self.align[at] for at in kept))

    @property
    def cells(self) -> list[list[Cell]]:
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in (self.titles, *self.rows)]

    def lines(self) -> list[str]:
        return aligned([self.titles, *self.rows], self.align)

    def markdown(self) -> Markup:
        """Return it in Markdown; what is not Markup is shown as it is written."""
        rule = ["---" if side == "l" else "---:" for side in self.align]
        titles, *rows = ([_in_markdown(cell) for cell in row] for row in self.cells)
        return Markup("\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows)))


def aligned(rows: Sequence[Row], align: str) -> list[str]:
    """Return rows as lines, their columns two spaces apart: words from the left (l), figures from the right (r)."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(num_columns, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        gaps = [" " * (width - num_columns(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = (cell + gap if side == "l" else gap + cell for cell, gap, side in zip(row, gaps, align, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


def num_columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: Hangul and other wide signs take two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def _in_markdown(cell: Cell) -> str:
    text = plain(cell.text)
    return (f"**{text}**" if cell.bold else text) + plain(cell.after)


def page(template: str, **values: object) -> str:
    return _environment(True).get_template(template).render(values)


def markdown(template: str, **values: object) -> str:
    return _environment(False).get_template(template).render(values)


def plain(value: Any) -> Markup:
    """Return a value as Markdown that shows it as it is; Markdown that was made here (Markup) is left alone."""
    return value if isinstance(value, Markup) else Markup(_SPECIAL.sub(r"\\\1", str(value)))


def code(text: str) -> Markup:
    return Markup(f"`{re.sub('[`|]', '', text)}`")


@cache
def _environment(html: bool) -> Environment:
    return Environment(
        loader=PackageLoader("scale_cli", "report/templates"),
        autoescape=html,
        finalize=None if html else plain,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
