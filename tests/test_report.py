import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.report import (
    DASH,
    Cell,
    Table,
    aligned,
    num_columns,
    number,
    perplexity,
    plain,
    quantity,
    worst_document,
)

TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)


@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=6))
def test_columns_of_lines_stand_beneath_each_other_in_any_script(rows: list[list[str]]) -> None:
    ended = [[*row, "|"] for row in rows]
    lines = aligned(ended, "lrrl")
    assert len({num_columns(line) for line in lines}) == 1
    for row, line in zip(rows, lines, strict=True):
        assert line.split() == [*filter(None, row), "|"]


@given(st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=6))
def test_a_table_in_markdown_has_as_many_cells_in_every_row_whatever_is_in_them(
    rows: list[list[str]],
) -> None:
    lines = Table(["a", Cell("b", "c", bold=True)], rows, "lr").markdown().splitlines()
    assert lines[:2] == ["| a | **b**, c |", "| --- | ---: |"]
    assert len(lines) == 2 + len(rows)
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines} == {3}


def test_markup_in_a_name_is_text_and_an_interval_stays_readable() -> None:
    assert plain("kobest_copa +0.5 [+0.2, +0.8]") == "kobest_copa +0.5 [+0.2, +0.8]"
    assert plain("_a_ b__c __d__") == r"\_a\_ b\_\_c \_\_d\_\_"
    assert (
        plain("[a](http://b) ![c](d) <e> *f* `g`") == r"[a\](http://b) \![c\](d) \<e\> \*f\* \`g\`"
    )


def test_a_column_of_dashes_alone_is_left_out_of_titles_rows_and_sides() -> None:
    made = Table(
        ["n", Cell("nothing"), "some"],
        [["1", DASH, DASH], ["20", Cell(DASH), "x"]],
        "rrl",
        "numbers",
    )
    assert made.without_empty_columns() == Table(
        ["n", "some"], [["1", DASH], ["20", "x"]], "rl", "numbers"
    )


def test_a_perplexity_can_be_read_and_a_worst_document_is_a_loss_or_none() -> None:
    assert [perplexity(value) for value in (123456.7, 9.99e12, None)] == [
        "123,456.70",
        "1.0e+13",
        "not finite",
    ]
    worst = [worst_document(value) for value in (10161.25, 0.25, -824.0, -1e-9, None)]
    assert worst == ["+10161", "+0.250", "none lost", "0.000", "not finite"]


@given(st.one_of(st.just(0.0), st.floats(-1e-9, 1e-9)), st.integers(0, 4))
def test_nothing_is_written_as_minus_or_plus_zero(value: float, digits: int) -> None:
    assert float(number(value, digits, "+")) == 0.0 and number(value, digits, "+")[0] == "0"


@given(st.floats(0.01, 1e23))
def test_a_quantity_is_told_in_three_digits(value: float) -> None:
    figure, *unit = quantity(value, "B").split()
    factor = 1000.0 ** " kMGTPEZ".index(unit[0].removesuffix("B") or " ")
    assert float(figure) * factor == pytest.approx(value, rel=5.1e-3, abs=5.1e-3)
    assert 0 < len(figure.replace(".", "")) <= 3
