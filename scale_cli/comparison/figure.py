"""The figure of a comparison: what each option lost and gained, with intervals."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from scale_cli.comparison.options import Option
from scale_cli.report import COLOURS, MARKS, Interval

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # the reader's font has Hangul, matplotlib's does not
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # a `$` in a run's name is not mathematics
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
}


def draw(options: Sequence[Option], sides: dict[str, str]) -> str:
    """Return an SVG: a panel for each of `Comparison.sides`, and a row for each option."""
    from matplotlib import rc_context  # takes a second, and only the figure needs it
    from matplotlib.figure import Figure

    written = io.StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure((8.0, 1.0 + 0.3 * len(options)), layout="constrained")
        panels = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
        for axes, (side, title) in zip(panels, sides.items(), strict=True):
            axes.axvline(0.0, color=COLOURS["base"])
            for place, option in enumerate(options):
                interval: Interval = getattr(option, side)
                if interval.value is None:
                    continue
                variant = option.run.config.method.variant
                colour = COLOURS[variant]
                inside = colour if option.num_models == 1 else "white"
                axes.plot(interval.value, place, MARKS[variant][0], color=colour, mfc=inside)
                if interval.low is not None and interval.high is not None:
                    axes.hlines(place, interval.low, interval.high, color=colour)
            axes.set(title=title, xlabel="bits/byte against the base")
        panels[0].set_yticks(range(len(options)), [option.label for option in options])
        panels[0].invert_yaxis()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
