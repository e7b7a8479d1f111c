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
def test_plain_data_comes_back_as_it_was_and_as_pyyaml_reads_it(tree: Any) -> None:
    text = dump(tree)  # in which text such as 0E0 is quoted: PyYAML takes it for text, we for a number
    assert parse(text, "x") == yaml.safe_load(text) == tree


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: not valid YAML (the key 'a' is there twice)"),
        ("a: {b: 1, 'b': 2}", "x:1: not valid YAML (the key 'b' is there twice)"),
        ("? [a]\n: 1", "x:1: not valid YAML (found unhashable key)"),
        ("a: 1\nb: &a {c: *a}", "x:2: not valid YAML (an alias, *a: "),
        ("[" * 100_000, "x:1: not valid YAML (nested more than 40 deep)"),
        ('a:\n  "\\0"', "x:2: not valid YAML (a NUL"),
        ('"\\ud800": 1', "x:1: not valid YAML (found invalid Unicode character escape code)"),
    ],
)
def test_what_is_refused_is_named_by_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x")
    message = str(caught.value)
    assert message.startswith(told)
    assert "\n" not in message


def test_no_more_is_read_than_a_config_can_be(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * (1 << 18) + "\n", encoding="utf-8")
    for path in (tmp_path / "large.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"more than 262,144 bytes"):
            read_text(path)
