from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from scale_cli.report import COLOURS, MARKS, Interval, draw_point, shorten, svg

HOSTILE = 'a$x_1^{2}$ <b onload="x">&amp; "'


def draw(figure: Any) -> None:
    axes = figure.subplots()
    for method, (mark, _) in MARKS.items():
        draw_point(axes, method, Interval(1, 0, 2), Interval(2, None, None), COLOURS[method], mark)
    axes.set_xlabel(HOSTILE)
    axes.legend()


def test_what_a_figure_is_labelled_with_is_text_as_it_stands() -> None:
    root = ElementTree.fromstring(svg(draw))
    shown = [element.text or "" for element in root.iter() if element.tag.endswith("}text")]
    assert HOSTILE in shown and set(MARKS) <= set(shown)


def test_a_figure_is_the_same_whenever_it_is_drawn() -> None:
    assert svg(draw) == svg(draw)


@given(st.text(max_size=100))
def test_a_label_is_whole_or_cut_in_its_middle(text: str) -> None:
    shown = shorten(text)
    assert len(shown) <= 36
    assert shown == text or (shown.startswith(text[:17]) and shown.endswith(text[-18:]))
