"""Where labels go, so that none lies on another, on a mark, or outside the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scale_cli.comparison.svg import Point

_GAP = 3.0
# How far out a label may move, and how many directions are tried at each distance.
_RADII = (9, 13, 18, 24, 31, 39, 48, 58, 70, 84, 100, 120, 145, 175, 210)
_DIRECTIONS = 16
_CROSSES_LINE, _LEADS = 3.0, 6.0


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box, gap: float = 0.0) -> bool:
        """Return whether two boxes overlap, or come nearer than a gap."""
        return (
            self.left < other.right + gap
            and other.left < self.right + gap
            and self.top < other.bottom + gap
            and other.top < self.bottom + gap
        )

    def within(self, other: Box) -> bool:
        """Return whether the other box holds this one."""
        inside = self.left >= other.left and self.right <= other.right
        return inside and self.top >= other.top and self.bottom <= other.bottom


def place_around(
    points: Sequence[Point], sizes: Sequence[Point], marks: Sequence[Box], lines: Sequence[Point], bounds: Box
) -> list[Box]:
    """Return a box for the label of each point: near it, and clear of the other labels and of every mark.

    Args:
        points: what is labelled.
        sizes: (width, height) of each label.
        marks: that no label may cover.
        lines: points along lines, which a label covers only where it must.
        bounds: of the figure.
    """
    # The most crowded choose first: the others have room to go elsewhere.
    order = sorted(range(len(points)), key=lambda index: sum(math.dist(points[index], other) for other in points))
    placed: dict[int, Box] = {}
    for index in order:
        taken = [*marks, *placed.values()]
        placed[index] = _best_place(points[index], sizes[index], taken, lines, bounds)
    return [placed[index] for index in range(len(points))]


def _best_place(point: Point, size: Point, taken: Sequence[Box], lines: Sequence[Point], bounds: Box) -> Box:
    best, least = None, math.inf
    for radius in _RADII:
        if radius >= least:
            break
        for direction in range(_DIRECTIONS):
            box = _beside(point, size, radius, 2 * math.pi * direction / _DIRECTIONS)
            if not box.within(bounds) or any(box.meets(other, _GAP) for other in taken):
                continue
            covered = sum(box.left < x < box.right and box.top < y < box.bottom for x, y in lines)
            # Reading goes best where the label stands level with its point, to the right.
            tilt = 2.0 * abs(math.sin(2 * math.pi * direction / _DIRECTIONS)) + 0.5 * (direction == _DIRECTIONS // 2)
            cost = radius + tilt + _CROSSES_LINE * covered + (_LEADS if radius > _RADII[1] else 0.0)
            if cost < least:
                best, least = box, cost
    return best or _beside(point, size, _RADII[0], 0.0)


def _beside(point: Point, size: Point, radius: float, angle: float) -> Box:
    """Return a box that touches the circle around a point with the side or corner that faces it."""
    x, y = point[0] + radius * math.cos(angle), point[1] + radius * math.sin(angle)
    left = x - size[0] * (1 - math.cos(angle)) / 2
    top = y - size[1] * (1 - math.sin(angle)) / 2
    return Box(left, top, left + size[0], top + size[1])


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near those wanted, in the same order, at least a gap apart, and between two ends if they fit.

    Args:
        wanted: along one direction.
        gap: between neighbours.
        low: end.
        high: end.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Runs of labels that touch move as one, to the mean of where their members want to be.
    runs: list[list[int]] = []
    for index in order:
        runs.append([index])
        while (
            len(runs) > 1
            and _middle(runs[-1], wanted, gap, low, high) - _middle(runs[-2], wanted, gap, low, high)
            < gap * (len(runs[-1]) + len(runs[-2])) / 2
        ):
            runs[-2:] = [runs[-2] + runs[-1]]
    places = [0.0] * len(wanted)
    for run in runs:
        first = _middle(run, wanted, gap, low, high) - gap * (len(run) - 1) / 2
        for offset, index in enumerate(run):
            places[index] = first + gap * offset
    return places


def _middle(run: list[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    reach = gap * (len(run) - 1) / 2
    mean = sum(wanted[index] for index in run) / len(run)
    return max(low + reach, min(mean, high - reach))
