from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from scale_cli.report.tables import DASH, Cell, Table, aligned, num_columns, plain

TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)


@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=6))
def test_columns_of_lines_stand_beneath_each_other_in_any_script(rows: list[list[str]]) -> None:
    ended = [[*row, "|"] for row in rows]
    lines = aligned(ended, "lrrl")
    assert len({num_columns(line) for line in lines}) == 1
    for row, line in zip(rows, lines, strict=True):
        assert line.split() == [*filter(None, row), "|"]


@given(st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=6))
def test_a_table_in_markdown_has_as_many_cells_in_every_row_whatever_is_in_them(rows: list[list[str]]) -> None:
    lines = Table(["a", Cell("b", "c", bold=True)], rows, "lr").markdown().splitlines()
    assert lines[:2] == ["| a | **b**, c |", "| --- | ---: |"]
    assert len(lines) == 2 + len(rows)
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines} == {3}


def test_markup_in_a_name_is_text_and_an_interval_stays_readable() -> None:
    assert plain("kobest_copa +0.5 [+0.2, +0.8]") == "kobest_copa +0.5 [+0.2, +0.8]"
    assert plain("_a_ b__c __d__") == r"\_a\_ b\_\_c \_\_d\_\_"
    assert plain("[a](http://b) ![c](d) <e> *f* `g`") == r"[a\](http://b) \![c\](d) \<e\> \*f\* \`g\`"


def test_a_column_of_dashes_alone_is_left_out_of_titles_rows_and_sides() -> None:
    made = Table(["n", Cell("nothing"), "some"], [["1", DASH, DASH], ["20", Cell(DASH), "x"]], "rrl", "numbers")
    assert made.without_empty_columns() == Table(["n", "some"], [["1", DASH], ["20", "x"]], "rl", "numbers")
