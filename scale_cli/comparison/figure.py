"""The figure of a comparison: what each option lost and gained, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scale_cli.comparison.options import Option
from scale_cli.report import COLOURS, MARKS, Interval, drawn


def draw(options: Sequence[Option], sides: dict[str, str]) -> str:
    """Return an SVG: a panel for each of `Comparison.sides`, and a row for each option."""

    def paint(figure: Any) -> None:
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

    return drawn((8.0, 1.0 + 0.3 * len(options)), paint)
