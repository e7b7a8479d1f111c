"""The picture of a report: what was lost against what was gained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from scale_cli.config.method_names import method_name
from scale_cli.evaluation.render import language_name
from scale_cli.evaluation.results import CorpusResult, Report

# Okabe and Ito's palette: told apart by colour-blind readers, and by marker in print.
_STYLE = {
    "base": ("base", "o", "#555555"),
    "adapted": ("adaptation head", "s", "#D55E00"),
    "posterior": ("routed, posterior", "D", "#0072B2"),
    "cosine": ("routed, cosine", "^", "#009E73"),
}


def is_drawable(report: Report) -> bool:
    """Return whether there is anything to set against each other."""
    return bool(report.with_role("retention") and report.with_role("acquisition"))


def draw_trade_off(report: Report, path: Path) -> None:
    """Draw one panel for every pair of a retention and an acquisition corpus; up and right is better.

    Args:
        report: with at least one corpus of each role.
        path: a .png to write.
    """
    import matplotlib  # takes a second, and only this needs it

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    name = method_name(report.variant)
    retained, acquired = report.with_role("retention"), report.with_role("acquisition")
    pairs = [(kept, taught) for kept in retained for taught in acquired]
    columns = min(3, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.4 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    for axis, (kept, taught) in zip(axes.flat, pairs, strict=False):
        _draw_panel(axis, kept, taught)
    for axis in list(axes.flat)[len(pairs) :]:
        axis.axis("off")
    title = f"{name[0].upper()}{name[1:]}\nkept and gained against the base, with 95 % intervals"
    figure.suptitle(title, fontsize=11)
    axes.flat[0].legend(frameon=False, fontsize=9, loc="best")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_panel(axis: Any, kept: CorpusResult, taught: CorpusResult) -> None:
    for name, (label, marker, colour) in _STYLE.items():
        lost, gained = kept.heads[name].bits_per_byte_difference, taught.heads[name].bits_per_byte_difference
        if lost.value is None or gained.value is None:
            continue
        place = (-gained.value, -lost.value)
        spans = (_span(lost.value, lost.low, lost.high), _span(gained.value, gained.low, gained.high))
        if name != "base":  # it differs from itself by nothing
            axis.errorbar(*place, *spans, fmt="none", ecolor=colour, elinewidth=1.6, zorder=2)
        filled = "white" if name == "base" else colour
        axis.plot(*place, marker, color=colour, label=label, markersize=8, markerfacecolor=filled, zorder=3)
    axis.axhline(0.0, color="#999999", linewidth=0.8, zorder=0)
    axis.axvline(0.0, color="#999999", linewidth=0.8, zorder=0)
    axis.set_xlabel(f"{language_name(taught.language)} gained ({taught.name}),\nbits/byte")
    axis.set_ylabel(f"{language_name(kept.language)} kept ({kept.name}),\nbits/byte, below 0 lost")
    axis.margins(0.15)
    axis.spines[["top", "right"]].set_visible(False)


def _span(value: float, low: float | None, high: float | None) -> list[list[float]]:
    """Return an interval's arms as matplotlib wants them, for the value with its sign turned."""
    return [[max(0.0, (value if high is None else high) - value)], [max(0.0, value - (value if low is None else low))]]
