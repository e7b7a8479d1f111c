"""The trade-off picture: what was lost against what was gained, and the options that no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from scale_cli.comparison.labels import Box, place_around
from scale_cli.comparison.options import Option, corpora_in_words, front, languages_of
from scale_cli.comparison.palette import MARKERS
from scale_cli.comparison.svg import Axis, Canvas, Point, shortened, text_width, tick_text
from scale_cli.comparison.words import with_interval
from scale_cli.evaluation.statistics import Interval

_BASE_LABEL = "base"
# Losses this far apart would lie on top of each other on a linear axis.
_WIDE_RANGE = 30.0
# Beyond so many times what the options differ by, the base is left outside the picture.
_FAR_FROM_BASE = 2.0
_MARK = 8.0


def draw_trade_off(options: Sequence[Option], width: float) -> Canvas:
    """Draw every option that has finite figures, its intervals, and the fronts.

    Args:
        options: of runs with corpora of both roles.
        width: of the figure, in pixels.
    """
    shown = [option for option in options if option.lost.value is not None and option.gained.value is not None]
    small = width < 600
    size = 11 if small else 12.5
    canvas = Canvas(width, min(1600.0, (400 if small else 480) + (16 if small else 6) * len(shown)))
    across, up = _axes(canvas, shown, small)
    _draw_frame(canvas, options, across, up, size)
    best, best_in_one = front(shown, lambda _: True), front(shown, lambda option: option.num_models == 1)
    lines = [_draw_front(canvas, best_in_one, across, up, "")]
    if best != best_in_one:
        lines.append(_draw_front(canvas, best, across, up, "5 4"))
    covered = [point for line in lines for point in _along(line)]
    for option in shown:
        arms = _arms(option, across, up)
        for arm in arms:
            canvas.line(arm, option.run.method.variant, 1.4)
            covered += _along(arm)
    for option in shown:
        variant = option.run.method.variant
        fill = variant if option.num_models == 1 else "paper"
        canvas.marker(_place(option, across, up), MARKERS[variant], variant, fill, _told(option))
    labels = []
    if _shows_base(across, up):
        origin = (across(0.0), up(0.0))
        canvas.marker(origin, MARKERS["base"], "base", "base", "the untouched base")
        labels.append((_BASE_LABEL, "base", origin))
    labels += [(option.label, option.run.method.variant, _place(option, across, up)) for option in shown]
    _draw_labels(canvas, labels, covered, size)
    return canvas


def _shows_base(across: Axis, up: Axis) -> bool:
    return across.low <= 0.0 <= across.high and up.low <= 0.0 <= up.high


def _told(option: Option) -> str:
    return f"{option.label}: lost {with_interval(option.lost)}, gained {with_interval(option.gained)} bits/byte"


def _axes(canvas: Canvas, shown: Sequence[Option], small: bool) -> tuple[Axis, Axis]:
    left, right, top, bottom = (52, 14, 30, 52) if small else (70, 24, 30, 56)
    lost, gained = (_reach([getattr(option, side) for option in shown]) for side in ("lost", "gained"))
    knee = _knee([option.lost.value or 0.0 for option in shown])
    across = _padded(lost, left, canvas.width - right, knee, 0.07)
    up = _padded(gained, canvas.height - bottom, top, None, 0.08)
    return across, up


def _reach(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return the ends of an axis: with zero, the base, unless all that differs would then lie in a corner."""
    ends = [end for i in intervals for end in (i.value, i.low, i.high) if end is not None]
    low, high = min(ends), max(ends)
    if min(abs(low), abs(high)) > _FAR_FROM_BASE * (high - low) > 0.0 and low * high > 0.0:
        return low, high
    return min(0.0, low), max(0.0, high)


def _knee(values: Sequence[float]) -> float | None:
    """Return where the axis turns logarithmic; None where a linear one shows everything."""
    largest = max((abs(value) for value in values), default=0.0)
    small = [abs(value) for value in values if 0.0 < abs(value) < largest / _WIDE_RANGE]
    if not small:
        return None
    return 10.0 ** math.floor(math.log10(max(median(small), largest / 1e4)))


def _padded(reach: tuple[float, float], start: float, stop: float, knee: float | None, share: float) -> Axis:
    low, high = reach if reach[0] < reach[1] else (reach[0] - 0.5, reach[1] + 0.5)
    if knee is None:
        pad = share * (high - low)
        return Axis(low - pad, high + pad, start, stop)
    bent_low, bent_high = math.asinh(low / knee), math.asinh(high / knee)
    pad = share * (bent_high - bent_low)
    return Axis(knee * math.sinh(bent_low - pad), knee * math.sinh(bent_high + pad), start, stop, knee)


def _draw_frame(canvas: Canvas, options: Sequence[Option], across: Axis, up: Axis, size: float) -> None:
    report = options[0].run.report
    written: list[tuple[float, float]] = []
    for x in sorted(across.ticks(4 if canvas.width < 600 else 8), key=lambda x: (abs(x), -x)):
        canvas.line([(across(x), up.start), (across(x), up.stop)], "axis" if x == 0 else "grid")
        # Where there is no room for every figure, those nearest zero are written first, positive ones before negative.
        half = text_width(tick_text(x), size - 1) / 2 + 3
        if all(abs(across(x) - at) > half + other for at, other in written):
            written.append((across(x), half))
            canvas.text((across(x), up.start + 17), tick_text(x), size=size - 1, colour="muted", anchor="middle")
    for y in up.ticks(6):
        canvas.line([(across.start, up(y)), (across.stop, up(y))], "axis" if y == 0 else "grid")
        canvas.text((across.start - 7, up(y) + 4), tick_text(y), size=size - 1, colour="muted", anchor="end")
    lost, gained = (languages_of(report, role) for role in ("retention", "acquisition"))
    kept, taught = (corpora_in_words(report.with_role(role)) for role in ("retention", "acquisition"))
    room = across.stop - across.start
    below = shortened(f"{lost} lost, bits/byte ({kept})", size, room)
    beside = shortened(f"{gained} gained, bits/byte ({taught})", size, up.start - up.stop)
    canvas.text(((across.start + across.stop) / 2, up.start + 40), below, size=size, anchor="middle")
    canvas.vertical_text((14 if canvas.width < 600 else 18, (up.start + up.stop) / 2), beside, size)
    canvas.text((across.start, 18), "↖ better", size=size, colour="muted", style="strong")


def _place(option: Option, across: Axis, up: Axis) -> Point:
    assert option.lost.value is not None
    assert option.gained.value is not None
    return across(option.lost.value), up(option.gained.value)


def _arms(option: Option, across: Axis, up: Axis) -> list[list[Point]]:
    x, y = _place(option, across, up)
    arms = []
    if option.lost.low is not None and option.lost.high is not None:
        arms.append([(across(option.lost.low), y), (across(option.lost.high), y)])
    if option.gained.low is not None and option.gained.high is not None:
        arms.append([(x, up(option.gained.low)), (x, up(option.gained.high))])
    return arms


def _draw_front(canvas: Canvas, options: Sequence[Option], across: Axis, up: Axis, dash: str) -> list[Point]:
    """Join the options of a front, beginning at the untouched base where nothing beats that."""
    path = [_place(option, across, up) for option in options]
    if _shows_base(across, up) and not any(
        (o.lost.value or 0.0) <= 0.0 and (o.gained.value or 0.0) >= 0.0 for o in options
    ):
        path = sorted([*path, (across(0.0), up(0.0))])
    if len(path) > 1:
        canvas.line(path, "axis", 1.6, dash)
    return path


def _along(line: Sequence[Point]) -> list[Point]:
    """Return points along a line, a few pixels apart."""
    points: list[Point] = []
    for (x0, y0), (x1, y1) in pairwise(line):
        count = max(1, int(math.dist((x0, y0), (x1, y1)) / 6))
        points += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1)]
    return points


def _draw_labels(
    canvas: Canvas, labels: Sequence[tuple[str, str, Point]], covered: Sequence[Point], size: float
) -> None:
    room = 0.34 * canvas.width
    texts = [shortened(text, size, room) for text, _, _ in labels]
    points = [point for _, _, point in labels]
    boxes = place_around(
        points,
        [(text_width(text, size), size + 2) for text in texts],
        [Box(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in points],
        covered,
        Box(50 if canvas.width < 600 else 74, 24, canvas.width - 4, canvas.height - 56),
    )
    for (_, colour, point), box in zip(labels, boxes, strict=True):
        near = (min(max(point[0], box.left), box.right), min(max(point[1], box.top), box.bottom))
        if math.dist(point, near) > 2 * _MARK:
            canvas.line([point, near], colour, 0.8)
    for text, (_, colour, _), box in zip(texts, labels, boxes, strict=True):
        canvas.text((box.left, box.bottom - 3.5), text, size=size, colour=colour, style="halo strong")
