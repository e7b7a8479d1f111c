from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.comparison.labels import Box, place_around, spread
from scale_cli.comparison.svg import Axis, linear_ticks, shortened, text_width

BOUNDS = Box(0, 0, 900, 600)
POINTS = st.lists(st.tuples(st.floats(100, 800), st.floats(100, 500)), min_size=1, max_size=14)


@given(POINTS)
@settings(max_examples=40, deadline=None)
def test_labels_lie_on_no_other_label_and_no_mark(points: list[tuple[float, float]]) -> None:
    marks = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    boxes = place_around(points, [(90.0, 14.0)] * len(points), marks, [], BOUNDS)
    for index, box in enumerate(boxes):
        assert box.within(BOUNDS)
        assert not any(box.meets(other) for other in [*boxes[:index], *marks])


@given(st.lists(st.floats(-50, 250), min_size=1, max_size=10))
def test_spread_labels_keep_their_order_their_gap_and_the_ends(wanted: list[float]) -> None:
    places = spread(wanted, 14.0, 0.0, 200.0)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    assert all(places[b] - places[a] >= 14.0 - 1e-6 for a, b in pairwise(order))
    assert min(places) >= -1e-6
    assert max(places) <= 200.0 + 1e-6


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.integers(2, 9))
def test_ticks_are_few_and_on_the_axis(low: float, length: float, about: int) -> None:
    ticks = linear_ticks(low, low + length, about)
    assert len(ticks) <= 2 * about + 2
    assert all(low - 1e-6 * length <= tick <= low + 1.000001 * length for tick in ticks)


@given(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from([None, 0.001, 0.1]))
def test_an_axis_keeps_order(one: float, other: float, knee: float | None) -> None:
    axis = Axis(-5, 5, 0, 100, knee)
    assert (axis(one) <= axis(other)) or one > other
    assert (axis(-5), axis(5)) == (0, 100)
    assert all(-5 <= tick <= 5 for tick in axis.ticks(5))


@given(st.text(min_size=1, max_size=60), st.floats(40, 200))
def test_a_shortened_text_fits_or_was_never_longer(text: str, width: float) -> None:
    assert text_width(shortened(text, 12, width), 12) <= max(width, text_width("가…가", 12))
