from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.safe_yaml import dump, parse, read_text
from scale_cli.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\x85\0"), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_plain_data_comes_back_as_it_was(tree: Any) -> None:
    assert parse(dump(tree), "x") == tree


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_where_nothing_is_refused_it_reads_as_pyyaml_does(tree: Any) -> None:
    text = dump(tree)  # in which text such as 0E0 is quoted: PyYAML takes it for text, we for a number
    assert parse(text, "x") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: the key 'a' is there twice"),
        ("a: {b: 1, 'b': 2}", "x:1: the key 'b' is there twice"),
        ("? [a]\n: 1", "x:1: a key is text"),
        ("a: &a [*a]", "x:1: nested more than 40 deep"),
        ("a: &a {b: *a}", "x:1: nested more than 40 deep"),
        ("a: &a [1, 2]\n" + "b: [" + "*a, " * 20_000 + "]", "x: more than 20,000 values"),
        ("[" * 50 + "]" * 50, "x:1: nested more than 40 deep"),
        ('a:\n  "\\0"', "x:2: a NUL"),
        ('"\\ud800": 1', "x:1: not valid YAML (found invalid Unicode character escape code)"),
    ],
)
def test_what_is_refused_is_named_by_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x")
    message = str(caught.value)
    assert told in message
    assert "\n" not in message


def test_an_alias_used_a_few_times_is_fine() -> None:
    assert parse("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}", "x") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


def test_no_more_is_read_than_a_config_can_be(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * (1 << 18) + "\n", encoding="utf-8")
    for path in (tmp_path / "large.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"more than 262,144 bytes"):
            read_text(path)
