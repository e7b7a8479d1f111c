"""Parts of reports: figures as text, tables, and pages and cards from templates.

Templates escape values: markup in the name of a run or a file is shown as text.
"""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from scale_cli.methods import METHODS
from scale_cli.values import counted, language_name

NOT_FINITE = "not finite"
DASH = "—"
NO_DIFFERENCE = "no difference shown"
# A p-value adjusted by Holm's method shows a difference if it is below this.
SIGNIFICANCE = 0.05
# Beyond these, digits are noise: in a perplexity, and in the nats that one document lost.
_LARGE_PERPLEXITY = 1e6
_MANY_NATS = 100.0
_FIGURES: dict[Any, Any] = {
    "svg.fonttype": "none",  # the reader's font has Hangul, matplotlib's does not
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # a `$` in a run's name is not mathematics
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
}

# Characters with a meaning in Markdown or its HTML. A bracket alone has none, nor has an underscore
# within a word: [+0.1, +0.2] and kobest_copa stay.
_SPECIAL = re.compile(r"([\\`*{}<>#|]|!(?=\[)|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_]))")


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    value: float | None  # None if not finite
    low: float | None  # None if there is one document, or no finite value
    high: float | None

    @property
    def ends(self) -> list[float]:
        return [end for end in (self.value, self.low, self.high) if end is not None]

    def __neg__(self) -> Interval:
        ends = (self.value, self.high, self.low)
        return Interval(*(None if end is None else -end + 0.0 for end in ends))


NO_INTERVAL = Interval(None, None, None)


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Return a figure, with sign if `sign` is "+"; nothing is written as minus zero."""
    if value is None:
        return NOT_FINITE
    text = f"{value:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0.0 else text


def bounds(interval: Interval, digits: int = 3) -> str:
    """Return the two ends of an interval in brackets; empty if there is no interval."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{number(interval.low, digits, '+')}, {number(interval.high, digits, '+')}]"


def with_interval(interval: Interval, digits: int = 3) -> str:
    """Return a difference with its interval: +0.001 [+0.001, +0.002]."""
    return f"{number(interval.value, digits, '+')} {bounds(interval, digits)}".strip()


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def quantity(value: float, unit: str = "") -> str:
    """Return a figure in three digits with an SI prefix: 9.03 GFLOP, 263 k, 42."""
    told = tqdm.format_sizeof(value)  # 9.03G
    figure = told.rstrip("kMGTPEZ")
    prefix = told.removeprefix(figure)
    if not prefix and value == int(value):
        figure = f"{value:.0f}"
    return f"{figure} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def perplexity(value: float | None) -> str:
    """Return a perplexity, which has no upper limit, with a readable number of digits."""
    if value is None:
        return NOT_FINITE
    return f"{value:,.2f}" if value < _LARGE_PERPLEXITY else f"{value:.1e}"


def worst_document(value: float | None) -> str:
    """Return the most nats that a document lost."""
    if value is not None and round(value, 3) < 0:
        return "none lost"
    return number(value, 3 if value is None or value < _MANY_NATS else 0, "+")


def verdict_of(p_holm: float | None) -> str:
    """Return what the test of a difference in accuracy says."""
    if p_holm is None:
        return "not tested"
    if p_holm >= SIGNIFICANCE:
        return NO_DIFFERENCE
    return "p < 0.001" if p_holm < 0.001 else f"p = {p_holm:.3f}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: words or a figure."""

    text: str
    below: str = ""  # small text below it, or after it
    bold: bool = False

    @property
    def after(self) -> str:
        """The text after it on one line: an interval as it is, anything else after a comma."""
        return f"{' ' if self.below.startswith('[') else ', '}{self.below}" if self.below else ""

    def __str__(self) -> str:
        return self.text + self.after


def difference_cell(difference: Interval) -> Cell:
    return Cell(number(difference.value, 4, "+"), bounds(difference, 4))


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under their titles."""

    titles: Row
    rows: Sequence[Row]
    align: str  # of every column: l (words) or r (figures)
    name: str = ""
    methods: Sequence[str] = ()  # by row: the method whose mark stands before it on a page

    def without_empty_columns(self) -> Table:
        kept = [
            at for at in range(len(self.titles)) if any(str(row[at]) != DASH for row in self.rows)
        ]
        titles, *rows = ([row[at] for at in kept] for row in (self.titles, *self.rows))
        return replace(self, titles=titles, rows=rows, align="".join(self.align[at] for at in kept))

    @property
    def cells(self) -> list[list[Cell]]:
        return [
            [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
            for row in (self.titles, *self.rows)
        ]

    def lines(self) -> list[str]:
        return aligned([self.titles, *self.rows], self.align)

    def markdown(self) -> Markup:
        """Return it in Markdown; text is escaped, unless it is Markup."""
        rows: list[list[str]] = []
        for cells in self.cells:
            texts = [f"**{plain(cell.text)}**" if cell.bold else plain(cell.text) for cell in cells]
            rows.append([text + plain(of.after) for text, of in zip(texts, cells, strict=True)])
        rows.insert(1, ["---" if side == "l" else "---:" for side in self.align])
        return Markup("\n".join(f"| {' | '.join(texts)} |" for texts in rows))


def aligned(rows: Sequence[Row], align: str) -> list[str]:
    """Return rows as lines, their columns two spaces apart.

    Words stand on the left of their column (l), figures on the right (r).
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(num_columns, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        gaps = [" " * (width - num_columns(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = (
            cell + gap if side == "l" else gap + cell
            for cell, gap, side in zip(row, gaps, align, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def num_columns(text: str) -> int:
    """Return how many terminal columns a text takes; Hangul and other wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def drawn(size: tuple[float, float], paint: Callable[[Any], None]) -> str:
    """Return an SVG of what `paint` draws on a figure; it needs matplotlib."""
    from matplotlib import rc_context  # takes a second, and only figures need it
    from matplotlib.figure import Figure

    written = io.StringIO()
    with rc_context(_FIGURES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(size, layout="constrained")
        paint(figure)
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def render(template: str, **values: object) -> str:
    """Return a template's text, filled with values.

    Its name says how values are escaped: NAME.html.j2, NAME.md.j2, NAME.yaml.j2.
    """
    return _environment(template.split(".")[1]).get_template(template).render(values)


def plain(value: Any) -> Markup:
    """Return a value escaped for Markdown; Markup, which was made here, stays as it is."""
    return value if isinstance(value, Markup) else Markup(_SPECIAL.sub(r"\\\1", str(value)))


@cache
def _environment(form: str) -> Environment:
    environment = Environment(
        loader=PackageLoader("scale_cli"),
        autoescape=form == "html",
        finalize=plain if form == "md" else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["base64"] = lambda text: b64encode(text.encode()).decode()
    environment.globals.update(
        COLOURS=COLOURS,
        MARKS=MARKS,
        counted=counted,
        language_name=language_name,
        number=number,
        percent=percent,
        with_interval=with_interval,
        worst_document=worst_document,
    )
    return environment


COLOURS = {"base": "#555555"} | {method.name: method.colour for method in METHODS.values()}
# Shapes repeat what colours say, for print without colour: matplotlib's name, and a character.
MARKS = {"base": ("o", "●")} | {method.name: method.mark for method in METHODS.values()}
