"""Where labels go, so that none lies on another, on a mark, or outside the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, low, right, high

# How far out a label may move, and how many directions are tried at each distance.
_RADII = (9, 13, 18, 24, 31, 39, 48, 58, 70, 84, 100, 120, 145, 175, 210)
_DIRECTIONS = 16
_MARK, _GAP = 8.0, 3.0
_CROSSES_LINE, _LEADS = 3.0, 6.0


def place_labels(points: Sequence[Place], sizes: Sequence[Place], lines: Sequence[Place], bounds: Box) -> list[Box]:
    """Return a box for the label, of a width and height, of each point: near it, clear of other labels and of marks.

    Points along lines are covered only where it must be.
    """
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in points]
    placed: dict[int, Box] = {}
    # The most crowded choose first: the others have room to go elsewhere.
    for index in sorted(range(len(points)), key=lambda index: sum(math.dist(points[index], p) for p in points)):
        around = [
            (_cost(box, radius, turn, lines), box)
            for radius in _RADII
            for turn in range(_DIRECTIONS)
            if _free(box := _beside(points[index], sizes[index], radius, turn), taken, bounds)
        ]
        placed[index] = min(around)[1] if around else _beside(points[index], sizes[index], _RADII[0], 0)
        taken.append(placed[index])
    return [placed[index] for index in range(len(points))]


def _beside(point: Place, size: Place, radius: float, turn: int) -> Box:
    """Return a box that touches the circle around a point with the side or corner that faces it."""
    cos, sin = (of(2 * math.pi * turn / _DIRECTIONS) for of in (math.cos, math.sin))
    left = point[0] + radius * cos - size[0] * (1 - cos) / 2
    low = point[1] + radius * sin - size[1] * (1 - sin) / 2
    return left, low, left + size[0], low + size[1]


def _free(box: Box, taken: Sequence[Box], bounds: Box) -> bool:
    left, low, right, high = box
    inside = left >= bounds[0] and low >= bounds[1] and right <= bounds[2] and high <= bounds[3]
    return inside and not any(
        left < other[2] + _GAP and other[0] < right + _GAP and low < other[3] + _GAP and other[1] < high + _GAP
        for other in taken
    )


def _cost(box: Box, radius: float, turn: int, lines: Sequence[Place]) -> float:
    covered = sum(box[0] < x < box[2] and box[1] < y < box[3] for x, y in lines)
    # Reading goes best where the label stands level with its point, to the right.
    tilt = 2.0 * abs(math.sin(2 * math.pi * turn / _DIRECTIONS)) + 0.5 * (turn == _DIRECTIONS // 2)
    return radius + tilt + _CROSSES_LINE * covered + (_LEADS if radius > _RADII[1] else 0.0)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near those wanted, in the same order, a gap apart, and between two ends if they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places = [min(max(place, low), high) for place in wanted]
    for below, above in pairwise(order):
        places[above] = max(places[above], places[below] + gap)
    for rank, index in enumerate(reversed(order)):
        places[index] = min(places[index], high - gap * rank)
    return places
