from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.report.label_placement import Box, place_labels, spread

BOUNDS = (0.0, 0.0, 900.0, 600.0)
POINTS = st.lists(st.tuples(st.floats(100, 800), st.floats(100, 500)), min_size=1, max_size=14)


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@given(POINTS)
@settings(max_examples=40, deadline=None)
def test_labels_lie_on_no_other_label_and_no_mark(points: list[tuple[float, float]]) -> None:
    marks = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    boxes = place_labels(points, [(90.0, 14.0)] * len(points), [], BOUNDS)
    for index, box in enumerate(boxes):
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= 900 and box[3] <= 600
        assert not any(meet(box, other) for other in [*boxes[:index], *marks])


@given(st.lists(st.floats(-50, 250), min_size=1, max_size=10))
def test_spread_labels_keep_their_order_their_gap_and_the_ends(wanted: list[float]) -> None:
    places = spread(wanted, 14.0, 0.0, 200.0)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    assert all(places[b] - places[a] >= 14.0 - 1e-6 for a, b in pairwise(order))
    assert min(places) >= -1e-6
    assert max(places) <= 200.0 + 1e-6
