"""Figures by matplotlib, as SVG: one style, a colour and a mark for each method."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

from scale_cli.methods import METHODS
from scale_cli.report.tables import Interval

COLOURS = {"base": "#555555"} | {method.name: method.colour for method in METHODS.values()}
# Shapes are the second code, for print without colour: for matplotlib, and as a sign in a line of text.
MARKS = {"base": ("o", "●")} | {method.name: method.mark for method in METHODS.values()}
AXIS = "#8a8a8a"
_LONGEST_LABEL = 36
_STYLE = {
    "svg.fonttype": "none",  # the reader's font has Hangul, matplotlib's has not
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # names of runs are text
    "font.size": 10,
    "axes.edgecolor": AXIS,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e2e2e2",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def svg(draw: Callable[[Any], None]) -> str:
    """Return what a function draws on a figure."""
    from matplotlib import rc_context  # takes a second, and only figures need it
    from matplotlib.figure import Figure

    written = io.StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type] # its keys are literals
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def add_legend(figure: Any) -> None:
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def shorten(label: str) -> str:
    """Return a label with an ellipsis in its middle where it is long."""
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[: half - 1]}…{label[-half:]}"


def draw_point(
    axes: Any, label: str, lost: Interval, gained: Interval, colour: str, marker: str, *, filled: bool = True
) -> None:
    arms = {"xerr": _arms(lost), "yerr": _arms(gained)}
    if any(arms.values()):
        axes.errorbar(lost.value, gained.value, **arms, fmt="none", ecolor=colour, elinewidth=1.4, zorder=2)
    axes.plot(
        lost.value,
        gained.value,
        marker,
        label=shorten(label),
        color=colour,
        markerfacecolor=colour if filled else "white",
        markersize=12 if marker == "*" else 8,
        zorder=3,
    )


def _arms(interval: Interval) -> list[list[float]] | None:
    """Return how far an interval reaches to either side, as matplotlib's error bars take it."""
    if interval.value is None or interval.low is None or interval.high is None:
        return None
    return [[max(0.0, interval.value - interval.low)], [max(0.0, interval.high - interval.value)]]
