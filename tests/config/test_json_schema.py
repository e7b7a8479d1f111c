import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from scale_cli.config.load import json_schema_text, load_config
from scale_cli.config.schema import RunConfig, leaves
from scale_cli.storage.atomic import read_json
from scripts.config_reference import files
from tests.small_runs import SMALLEST, error_of, load_text

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
VALIDATOR = Draft202012Validator(json.loads(json_schema_text()))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_docs_hold_the_schema_that_the_code_has(path: Path) -> None:
    assert path.read_text() == files()[path], "make reference"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_ours_names_its_schema_and_is_valid_by_it_as_written_and_as_resolved(
    path: Path,
) -> None:
    named = re.match(r"# yaml-language-server: \$schema=(.*)\n", path.read_text())
    assert named is not None
    assert read_json(path.parent / named[1]) == json.loads(json_schema_text())
    VALIDATOR.validate(json.loads(load_config(path).model_dump_json()))


def put(tree: Any, key: str, value: Any) -> None:
    *sections, last = (int(part) if part.isdigit() else part for part in key.split("."))
    for part in sections:
        tree = tree[part]
    tree[last] = value


RESOLVED = json.loads(load_text(SMALLEST).model_dump_json())
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**33),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["", "no", "bf16", "ko", "route", "llama", "top:2", "all", "1-sqrt", "wsd"]),
    st.lists(st.sampled_from(["kobest", "llama", "adapter", "mlp", "q_proj"]), max_size=2),
)


@settings(max_examples=200)
@given(place=st.sampled_from([key for key, _ in leaves(RESOLVED)]), value=VALUES)
def test_what_loads_is_valid_by_the_schema(place: str, value: Any) -> None:
    tree = copy.deepcopy(RESOLVED)
    put(tree, place, value)
    try:
        RunConfig.model_validate(tree)
    except ValueError:
        return
    if value is False and place.endswith(".mixed_precision"):
        return  # what YAML 1.1 makes of `no`; an editor reads YAML 1.2
    VALIDATOR.validate(tree)


@pytest.mark.parametrize(
    "key", ["trian", "train.max_step", "corpus.sources.0.languages", "evaluation.benchmarks.0.nam"]
)
def test_a_key_that_does_not_load_is_not_valid_by_the_schema(key: str) -> None:
    tree = yaml.safe_load(SMALLEST) | {"evaluation": {"benchmarks": [{"name": "kobest_copa"}]}}
    VALIDATOR.validate(tree)
    put(tree, key, 1)
    assert "unknown key" in error_of(yaml.safe_dump(tree))
    assert not VALIDATOR.is_valid(tree)


def test_every_key_says_what_it_means() -> None:
    (page,) = (text for path, text in files().items() if path.suffix == ".md")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 90
    assert not [row[0] for row in rows if not row[-1].strip(" |")]
