"""A canvas that writes SVG, axes that map figures to pixels, and how wide a text will be."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from scale_cli.comparison.palette import figure_style

Point = tuple[float, float]
# Advance widths of a wide bold sans (DejaVu), in ems: which font the reader has is not known, and labels must fit.
_LATIN_EM, _WIDE_EM = 0.64, 1.0


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is, Hangul and other wide signs included."""
    return size * sum(_WIDE_EM if unicodedata.east_asian_width(sign) in "WF" else _LATIN_EM for sign in text)


def shortened(text: str, size: float, width: float) -> str:
    """Return a text that fits a width, with an ellipsis in its middle where some had to go."""
    if text_width(text, size) <= width:
        return text
    kept = len(text) - 1
    while kept > 2 and text_width(text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :], size) > width:
        kept -= 1
    return text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]


@dataclass(frozen=True)
class Axis:
    """A linear axis; or, with a `knee`, one that is linear up to it and logarithmic beyond, on both sides of zero.

    Args:
        low: figure at `start`.
        high: figure at `stop`.
        start: pixel.
        stop: pixel.
        knee: None for a linear axis.
    """

    low: float
    high: float
    start: float
    stop: float
    knee: float | None = None

    def __call__(self, value: float) -> float:
        """Return the pixel of a figure, held within the axis."""
        low, high, at = (self._bent(x) for x in (self.low, self.high, min(max(value, self.low), self.high)))
        return self.start + (self.stop - self.start) * (at - low) / (high - low)

    def _bent(self, value: float) -> float:
        return value if self.knee is None else math.asinh(value / self.knee)

    def ticks(self, about: int) -> list[float]:
        """Return round figures along the axis; of a bent one the powers of ten."""
        if self.knee is None:
            return linear_ticks(self.low, self.high, about)
        decades = range(round(math.log10(self.knee)), 1 + math.ceil(math.log10(max(-self.low, self.high, self.knee))))
        powers = [10.0**decade for decade in decades]
        return [x for x in (*(-power for power in reversed(powers)), 0.0, *powers) if self.low <= x <= self.high]


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round figures from `low` to `high`."""
    rough = (high - low) / max(1, about)
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * decade for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Return a tick's figure, without zeros that say nothing."""
    text = f"{value:.6f}".rstrip("0").rstrip(".") if abs(value) < 1e4 else f"{value:,.0f}"
    return text.replace("-", "−")


@dataclass
class Canvas:
    """Collects the marks of one figure.

    Args:
        width: in pixels, at which text has its nominal size.
        height: likewise.
    """

    width: float
    height: float
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Iterable[Point], colour: str, width: float = 1.0, dash: str = "") -> None:
        """Draw a polyline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" class="s-{colour}" fill="none" stroke-width="{width:g}"'
            f' stroke-linejoin="round" stroke-linecap="round"{dashed}/>'
        )

    def text(
        self, at: Point, text: str, *, size: float = 12, colour: str = "ink", anchor: str = "start", style: str = ""
    ) -> None:
        """Write a text whose baseline starts, is centred or ends at a point.

        Args:
            at: the point.
            text: not yet escaped.
            size: in pixels.
            colour: of the palette.
            anchor: start | middle | end.
            style: classes: `strong`, `halo` (a rim of paper, for a label over lines).
        """
        classes = f"f-{colour} {style}".strip() + (" s-paper" if "halo" in style else "")
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" class="{classes}" font-size="{size:g}"'
            f' text-anchor="{anchor}">{escape(text)}</text>'
        )

    def vertical_text(self, at: Point, text: str, size: float = 12) -> None:
        """Write a text upwards, centred at a point."""
        self._parts.append(
            f'<text transform="translate({at[0]:.1f} {at[1]:.1f}) rotate(-90)" class="f-ink" font-size="{size:g}"'
            f' text-anchor="middle">{escape(text)}</text>'
        )

    def bar(self, corner: Point, size: Point, colour: str, fill: str, told: str = "") -> None:
        """Draw a bar, filled with its colour or, hollow, with paper; `told` is what a pointer over it shows."""
        self._parts.append(
            f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{max(0.0, size[0]):.1f}" height="{size[1]:.1f}"'
            f' class="s-{colour} f-{fill}" stroke-width="1.4">{_title(told)}</rect>'
        )

    def marker(self, at: Point, shape: str, colour: str, fill: str, told: str = "", radius: float = 5.0) -> None:
        """Draw a method's mark, filled with its colour or, hollow, with paper."""
        self._parts.append(
            f'<path d="{marker_path(at, shape, radius)}" class="s-{colour} f-{fill}" stroke-width="1.8"'
            f' stroke-linejoin="round">{_title(told)}</path>'
        )

    def inline(self, told: str, kind: str) -> str:
        """Return the figure for a page, whose style it takes; `kind` is a class."""
        return self._element(told, f'class="figure {kind}"', "")

    def standalone(self, told: str) -> str:
        """Return the figure as a file of its own."""
        size = f'xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" class="figure"'
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" class="f-paper"/>'
        return self._element(told, size, f"<style>{figure_style()}</style>\n{paper}\n") + "\n"

    def _element(self, told: str, attributes: str, head: str) -> str:
        marks = "\n".join(self._parts)
        return (
            f'<svg {attributes} viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(told)}">\n'
            f"{head}{marks}\n</svg>"
        )


def _title(told: str) -> str:
    return f"<title>{escape(told)}</title>" if told else ""


def marker_path(at: Point, shape: str, radius: float) -> str:
    """Return the outline of a marker: circle | square | up | down | diamond | cross | star."""
    x, y = at
    if shape == "circle":
        return (
            f"M{x - radius:.1f} {y:.1f}a{radius} {radius} 0 1 0 {2 * radius} 0a{radius} {radius} 0 1 0 {-2 * radius} 0Z"
        )
    third = 0.36 * radius
    outlines: dict[str, Sequence[Point]] = {
        "square": [(-0.88 * radius, s * 0.88 * radius) for s in (-1, 1)]
        + [(0.88 * radius, s * 0.88 * radius) for s in (1, -1)],
        "up": _spokes([1.2 * radius], 3, -90),
        "down": _spokes([1.2 * radius], 3, 90),
        "diamond": _spokes([1.2 * radius], 4, -90),
        "star": _spokes([1.4 * radius, 0.6 * radius], 10, -90),
        "cross": [
            *((-third, -radius), (third, -radius), (third, -third), (radius, -third), (radius, third), (third, third)),
            *(
                (third, radius),
                (-third, radius),
                (-third, third),
                (-radius, third),
                (-radius, -third),
                (-third, -third),
            ),
        ],
    }
    return "M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in outlines[shape]) + "Z"


def _spokes(radii: Sequence[float], count: int, first_degrees: float) -> list[Point]:
    angles = [math.radians(first_degrees + 360 * index / count) for index in range(count)]
    return [
        (radii[index % len(radii)] * math.cos(angle), radii[index % len(radii)] * math.sin(angle))
        for index, angle in enumerate(angles)
    ]
