"""Figures by matplotlib: one style, a colour and a mark for each method, SVG for pages and PNG for files.

A figure is a function that draws on a matplotlib figure of a given width in pixels and sets its height.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from scale_cli.report.label_placement import Place
from scale_cli.report.numbers import Interval, with_interval
from scale_cli.report.tables import num_columns

Draw = Callable[[Any, float], None]

# Okabe and Ito's palette without its yellow, which vanishes on white, and with a brown; (on light, on dark).
# Source: https://jfly.uni-koeln.de/color/
COLOURS = {
    "base": ("#555555", "#b5b5b5"),
    "full": ("#d55e00", "#f27a2a"),
    "lora": ("#d99000", "#f0b429"),
    "osf": ("#8c7a00", "#c9b83a"),
    "freeze": ("#bf5f95", "#dd8fbd"),
    "llama-pro": ("#7a4a1e", "#c9a27e"),
    "adept": ("#7b58b8", "#b296e0"),
    "elo": ("#5c7a29", "#9bbf5c"),
    "preserve": ("#3a9bd9", "#74c3f0"),
    "adapt": ("#00866a", "#2fbf9b"),
    "route": ("#0063a8", "#4a9ff0"),
    "ink": ("#1b1b1b", "#ececec"),
    "muted": ("#5f5f5f", "#a8a8a8"),
    "grid": ("#e2e2e2", "#353535"),
    "axis": ("#8a8a8a", "#7a7a7a"),
    "paper": ("#ffffff", "#141414"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
# Shapes are the second code, for print without colour: for matplotlib, and as a sign in a line of text.
MARKS = {
    "base": ("o", "●"),
    "full": ("o", "●"),
    "lora": ("s", "■"),
    "osf": ("X", "✖"),
    "freeze": ("^", "▲"),
    "llama-pro": ("D", "◆"),
    "adept": ("h", "⬢"),
    "elo": ("d", "♦"),
    "preserve": ("v", "▼"),
    "adapt": ("P", "✚"),
    "route": ("*", "★"),
}
FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", "Noto Sans KR", '
    '"Noto Sans CJK KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif'
)
# Which font the reader has is not known, and labels must fit: as wide as a wide bold sans (DejaVu), in ems.
_COLUMN_EM = 0.64
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # names of runs are text
    "text.color": LIGHT["ink"],
    "font.size": 11.5,
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT["axis"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 1.0,
    "lines.markeredgewidth": 1.6,
    "legend.frameon": False,
    **{
        f"{axis}tick.{key}": value
        for axis in "xy"
        for key, value in (("labelcolor", LIGHT["muted"]), ("labelsize", 11))
    },
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
}
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
# A group of this name shows the rest of it to a pointer.
_POINTED_AT = "pointed at: "


def svg_for_page(draw: Draw, width: float, title: str) -> Markup:
    """Return a figure for a page, whose colours (dark ones too) and font it takes."""
    root = _tree(draw, width, title)
    names = {light: name for name, light in LIGHT.items()}
    for element in root.iter():
        if "style" in element.attrib:
            style = re.sub(
                "#[0-9a-f]{6}", lambda found: f"var(--{names.get(found[0], 'ink')})", element.get("style", "")
            )
            element.set("style", style)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def svg_alone(draw: Draw, width: float, title: str) -> str:
    """Return a figure as a file of its own, on light paper."""
    root = _tree(draw, width, title)
    style = ElementTree.Element(f"{_SVG}style")
    style.text = f"text {{ font-family: {FONT}; paint-order: stroke; stroke: #fff; stroke-width: 3px; }}"
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def png(draw: Callable[[Any], None], path: Path) -> None:
    """Write a figure, which sets its own size, as PNG."""
    _render(draw, path, format="png", dpi=160)


def _render(draw: Callable[[Any], None], to: Path | io.StringIO, **how: Any) -> None:
    from matplotlib import rc_context  # takes a second, and only figures need it
    from matplotlib.figure import Figure

    with rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type] # its keys are literals
        warnings.filterwarnings("ignore", "Glyph")  # the reader's font has it
        figure = Figure(dpi=72)
        draw(figure)
        figure.savefig(to, **how)


def _tree(draw: Draw, width: float, title: str) -> ElementTree.Element:
    """Return matplotlib's SVG without what a page with several of them cannot hold: ids, references, fonts."""
    written = io.StringIO()
    _render(lambda figure: draw(figure, width), written, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", _SVG[1:-1])
    root = ElementTree.fromstring(written.getvalue())
    shapes = {f"#{shape.get('id')}": shape.get("d", "") for shape in root.iter(f"{_SVG}path")}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}defs"):
                parent.remove(child)
        name = parent.attrib.pop("id", "")
        if name.startswith(_POINTED_AT):
            ElementTree.SubElement(parent, f"{_SVG}title").text = name.removeprefix(_POINTED_AT)
        parent.attrib.pop("clip-path", None)
        if "style" in parent.attrib:
            parent.set("style", re.sub(r"font-family: [^;]*;? ?", "", parent.attrib["style"]))
        if parent.tag == f"{_SVG}use":
            at = parent.attrib.pop("x"), parent.attrib.pop("y")
            parent.tag = f"{_SVG}path"
            parent.attrib |= {"d": shapes[parent.attrib.pop(_HREF)], "transform": f"translate({' '.join(at)})"}
    for size in ("width", "height"):
        root.set(size, root.get(size, "").removesuffix("pt"))
    root.attrib |= {"class": "figure", "role": "img", "aria-label": title}
    return root


def set_size(figure: Any, width: float, height: float) -> None:
    """Give a figure its size, in pixels."""
    figure.set_size_inches(width / 72, height / 72)


def panel(figure: Any, left: float, top: float, right: float, bottom: float) -> Any:
    """Return axes at a place in a figure, in pixels from its upper left corner."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    axes = figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}".replace("-", "−"))
    return axes


@dataclass(frozen=True)
class TradeOffPoint:
    """One model of a trade-off picture; what it lost and gained must be finite."""

    label: str
    colour: str  # of the palette
    marker: str  # as matplotlib names it
    lost: Interval
    gained: Interval
    filled: bool = True

    @property
    def place(self) -> Place:
        """Where it stands."""
        assert self.lost.value is not None
        assert self.gained.value is not None
        return self.lost.value, self.gained.value


def draw_points(axes: Any, points: Sequence[TradeOffPoint]) -> None:
    """Draw marks, and their intervals beneath all of them."""
    for point in points:
        colour = LIGHT[point.colour]
        arms = {"xerr": _arms(point.lost), "yerr": _arms(point.gained)}
        if any(arms.values()):
            axes.errorbar(*point.place, **arms, fmt="none", ecolor=colour, elinewidth=1.4, zorder=2)
        axes.plot(
            *point.place,
            point.marker,
            label=point.label,
            color=colour,
            markerfacecolor=colour if point.filled else LIGHT["paper"],
            markersize=12 if point.marker == "*" else 9,
            zorder=3,
            gid=pointed_at(
                f"{point.label}: lost {with_interval(point.lost, 4)}, gained {with_interval(point.gained, 4)} bits/byte"
            ),
        )


def pointed_at(text: str) -> str:
    """Return the gid of an artist that shows a text to a pointer."""
    return _POINTED_AT + text


def _arms(interval: Interval) -> list[list[float]] | None:
    if interval.value is None or interval.low is None or interval.high is None or interval.low == interval.high:
        return None
    return [[max(0.0, interval.value - interval.low)], [max(0.0, interval.high - interval.value)]]


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is in pixels, Hangul and other wide signs included."""
    return size * _COLUMN_EM * num_columns(text)


def shortened(text: str, size: float, width: float) -> str:
    """Return a text that fits a width, with an ellipsis in its middle where some had to go."""
    cut = text
    for kept in range(len(text) - 1, 1, -1):
        if text_width(cut, size) <= width:
            break
        cut = text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]
    return cut


def write_at(figure: Any, at: Place, text: str, **how: Any) -> None:
    """Write a text at a place in pixels, from the lower left corner of the figure."""
    figure.text(at[0] / 72, at[1] / 72, text, transform=figure.dpi_scale_trans, **how)


def lead_to(figure: Any, start: Place, end: Place, colour: str) -> None:
    """Draw a thin line between two places in pixels, from a mark to its label."""
    from matplotlib.lines import Line2D

    xs, ys = ([start[axis] / 72, end[axis] / 72] for axis in (0, 1))
    figure.add_artist(Line2D(xs, ys, transform=figure.dpi_scale_trans, color=LIGHT[colour], linewidth=0.8))
