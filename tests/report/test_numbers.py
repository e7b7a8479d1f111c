from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.report.tables import Interval, number, perplexity, quantity, with_interval, worst_document


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.14159, "3.14"), (123456.7, "123,456.70"), (2.34e7, "2.3 × 10⁷"), (9.99e12, "1.0 × 10¹³"), (None, "not finite")],
)
def test_a_perplexity_can_be_read_however_large(value: float | None, text: str) -> None:
    assert perplexity(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.6931, "+0.693"),
        (10161.25, "+10,161"),
        (-7222.4, "-7,222"),
        (-0.25, "-0.250"),
        (-0.0, "0.000"),
        (-1e-9, "0.000"),
        (None, "not finite"),
    ],
)
def test_the_worst_document_is_signed_and_never_minus_zero(value: float | None, text: str) -> None:
    assert worst_document(value) == text


def test_numbers_are_signed_where_they_are_differences() -> None:
    assert number(1.23456) == "1.235"
    assert number(None) == "not finite"
    assert with_interval(Interval(0.5, 0.25, 0.75)) == "+0.500 [+0.250, +0.750]"
    assert with_interval(Interval(-0.5, None, None), 1) == "-0.5"
    assert with_interval(Interval(None, None, None)) == "not finite"


@given(st.one_of(st.just(0.0), st.floats(-1e-9, 1e-9)), st.integers(0, 4))
def test_nothing_is_written_as_minus_or_plus_zero(value: float, digits: int) -> None:
    assert float(number(value, digits, "+")) == 0.0 and number(value, digits, "+")[0] == "0"


@given(st.floats(0.01, 1e23))
def test_a_quantity_is_told_in_three_digits(value: float) -> None:
    figure, *unit = quantity(value, "B").split()
    factor = 1000.0 ** " kMGTPEZ".index(unit[0].removesuffix("B") or " ")
    assert float(figure) * factor == pytest.approx(value, rel=5.1e-3, abs=5.1e-3)
    assert 0 < len(figure.replace(".", "")) <= 3


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.0254e9, "9.03 G"), (263_168, "263 k"), (42, "42"), (0, "0"), (999.6, "1.00 k"), (None, "not recorded")],
)
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value) == text
