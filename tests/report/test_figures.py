from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.report.figures import (
    LIGHT,
    MARKS,
    TradeOffPoint,
    draw_points,
    panel,
    set_size,
    shortened,
    svg_alone,
    svg_for_page,
    text_width,
)
from scale_cli.report.numbers import Interval

HOSTILE = 'a$x_1^{2}$ <b onload="x">&amp; style="fill: #d55e00"'


def draw(figure: Any, width: float) -> None:
    set_size(figure, width, 300)
    axes = panel(figure, 50, 30, width - 20, 250)
    draw_points(
        axes, [TradeOffPoint(HOSTILE, "full", mark, Interval(1, 0, 2), Interval(2, 1, 3)) for mark, _ in MARKS.values()]
    )
    axes.set_xlabel(HOSTILE)


def test_a_figure_on_a_page_has_its_colours_and_neither_ids_nor_references() -> None:
    for text in (svg_for_page(draw, 400, "t"), svg_alone(draw, 400, "t")):
        root = ElementTree.fromstring(text)
        attributes = [name for element in root.iter() for name in element.attrib]
        assert not [name for name in attributes if name in ("id", "clip-path") or name.endswith("href")]
        assert not [element for element in root.iter() if element.tag.endswith("}use")]
        assert (root.get("width"), root.get("height")) == ("400", "300")
    root = ElementTree.fromstring(svg_for_page(draw, 400, "t"))
    styles = " ".join(element.get("style", "") for element in root.iter())
    assert "#" not in styles and "var(--full)" in styles and "var(--paper)" in styles
    assert LIGHT["full"] in svg_alone(draw, 400, "t")


def test_what_a_figure_is_labelled_with_is_text_as_it_stands() -> None:
    root = ElementTree.fromstring(svg_for_page(draw, 400, HOSTILE))
    shown = [element.text or "" for element in root.iter() if element.tag.endswith(("}text", "}title"))]
    assert HOSTILE in shown
    assert any(text.startswith(f"{HOSTILE}: lost +1.0000 [0.0000, +2.0000]") for text in shown)
    assert root.get("aria-label") == HOSTILE


@given(st.text(min_size=1, max_size=60), st.floats(40, 200))
@settings(deadline=None)
def test_a_shortened_text_fits_or_was_never_longer(text: str, width: float) -> None:
    assert text_width(shortened(text, 12, width), 12) <= max(width, text_width("가…가", 12))
