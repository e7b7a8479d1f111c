from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.load import dump, dump_config, parse, read_text
from scale_cli.errors import ConfigError
from tests.small_runs import EVALUATED, SMALLEST, error_of, load_text


def test_every_spelling_of_a_float_is_a_number() -> None:
    for written in ("1e-4", "1E-4", "1.e-4", ".1e-3", "+1e-4"):
        assert (
            load_text(SMALLEST.replace("max_steps: 10", f"max_steps: 10, lr: {written}")).train.lr
            == 0.0001
        )


def test_a_date_is_text() -> None:
    assert load_text(SMALLEST, "model.revision=2026-01-01").model.revision == "2026-01-01"


@pytest.mark.parametrize("written", ["no", "'no'", "No", "off"])
def test_a_bare_no_is_a_precision(written: str) -> None:
    assert load_text(SMALLEST, f"train.mixed_precision={written}").train.mixed_precision == "no"


def test_the_value_of_an_override_is_yaml_and_reaches_elements_of_lists() -> None:
    config = load_text(
        SMALLEST,
        "method.variant=adapt",
        "method.collaboration={layers: [0, 2], modules: [mlp]}",
        "corpus.cache_dir=~",
        "model.revision='1e5'",
        "corpus.sources.0.weight=3",
        "corpus.sources.0.weight=2",  # the later one wins
        "corpus.sources.0.path=lang=ko/part.txt",
    )
    assert (config.method.collaboration.layers, config.method.collaboration.modules) == (
        [0, 2],
        ["mlp"],
    )
    assert (config.corpus.cache_dir, config.model.revision) == (None, "1e5")
    (source,) = config.corpus.sources
    assert (source.name, source.weight, source.path) == ("news", 2.0, "lang=ko/part.txt")
    whole = load_text(
        SMALLEST, "corpus.sources.0={name: other, dataset: some/set, language: en}"
    ).corpus.sources
    assert [(source.name, source.path, source.dataset) for source in whole] == [
        ("other", None, "some/set")
    ]


@pytest.mark.parametrize(
    ("overrides", "formats"),
    [
        ([], ["plain"]),
        (["method.variant=full"], ["plain"]),
        (["method.variant=lora"], ["adapter"]),
        (["method.variant=lora", "export.format=plain"], ["plain"]),
        (["method.variant=lora", "export.format=llama"], ["plain"]),  # its name before
        (["method.variant=lora", "export.format=plain", "export.dtype=float16"], ["plain"]),
        (["method.collaboration.layers=top:1"], ["plain", "transformers"]),
        (["method.variant=route", "method.router.rule=cosine"], ["plain", "transformers"]),
        (["method.collaboration.layers=top:1", "export.format=plain"], ["plain"]),
    ],
)
def test_a_lora_run_is_exported_as_adapter_and_a_routed_one_in_two_folders_if_need_be_unless_the_config_says_so(
    overrides: list[str], formats: list[str]
) -> None:
    assert load_text(SMALLEST, *overrides).export.format == formats


@pytest.mark.parametrize("section", ["export:", "export: ~", "export: {}"])
def test_an_override_fills_an_empty_section(section: str) -> None:
    assert load_text(f"{SMALLEST}{section}\n", "export.format=adapter").export.format == ["adapter"]
    text = SMALLEST.replace("- {name: news, path: news.txt, language: ko}", "-")
    overrides = [f"corpus.sources.0.{field}" for field in ("name=a", "path=a.txt", "language=en")]
    assert load_text(text, *overrides).corpus.sources[0].name == "a"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.max_steps", "key.sub=value"),
        ("train..lr=1", "key.sub=value"),
        ("corpus.sources.1.name=x", "'1'"),
        ("corpus.sources.-1.name=x", "'-1'"),
        (f"corpus.sources.{'9' * 5000}=x", "not a key or index"),
        ("model.base.sub=x", "'sub' is not a key or index"),
        ("train.lr=[", "not valid YAML"),
        ("corpus.sources.0.path=*.txt", "; write it in quotes: 'corpus.sources.0.path=\"*.txt\"'"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(override: str, named: str) -> None:
    message = error_of(SMALLEST, override)
    assert repr(override[:200])[:-1] in message and named in message
    assert len(message) < 1000 and "\n" not in message


@pytest.mark.parametrize(
    "override", ["train.lr=fast", "train.lrr=1", "corpus.sources.0.weight=-1", "train={lr: -1}"]
)
def test_a_mistake_in_an_override_is_told_of_the_override_and_one_beside_it_of_the_file(
    override: str,
) -> None:
    told = error_of(SMALLEST.replace("max_steps: 10", "max_steps: none"), override).splitlines()
    of_override = [line for line in told if line.startswith(f"override {override!r}: ")]
    assert (
        len(of_override) == len(told) if override.startswith("train={") else len(of_override) == 1
    )
    assert all("max_steps" in line for line in told if line not in of_override)


@settings(max_examples=30)
@given(share=st.integers(1, 60), num_processes=st.integers(1, 4))
def test_a_micro_batch_that_is_left_open_divides_every_processs_share(
    share: int, num_processes: int
) -> None:
    train = load_text(SMALLEST, f"train.global_batch_size={share * num_processes}").train
    at_once = train.sequences_at_once(num_processes)
    assert share % at_once == 0
    assert at_once == min(share, 8) or share % min(share, 8)


# PyYAML folds the line breaks that are not ASCII (U+0085, U+2028, U+2029) when it writes Unicode as it is.
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\x85\0"), max_size=8
)
NUMBER_LIKE = st.from_regex(r"\A[-+]?[0-9._]{1,3}([eE][-+]?[0-9]{1,2})?\Z")
SCALARS = (
    NUMBER_LIKE | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


@settings(max_examples=50)
@given(TREES)
def test_plain_data_comes_back_as_it_was_and_as_pyyaml_reads_it(tree: Any) -> None:
    text = dump(
        tree
    )  # in which text such as 0E0 is quoted: PyYAML takes it for text, we for a number
    assert parse(text, "x") == yaml.safe_load(text) == tree


def test_a_dumped_config_loads_as_itself() -> None:
    before = load_text(
        EVALUATED,
        "model.base='1e5'",
        "model.revision='~'",
        "train.lr=5e-324",
        "evaluation.batch_size=1",
    )
    assert load_text(dump_config(before)) == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: not valid YAML (the key 'a' occurs twice)"),
        ("a: 1\nb: 010", "x:2: not valid YAML (010 is read as 8; write a number in plain digits"),
        ("a: 1:30", "x:1: not valid YAML (1:30 is read as 90; "),
        ("a: -1:30.5", "x:1: not valid YAML (-1:30.5 is read as "),
        ("a: [1, 0x10]", "x:1: not valid YAML (0x10 is read as 16; "),
        ("a: 0b11", "x:1: not valid YAML (0b11 is read as 3; "),
        ("a: 1_000", "x:1: not valid YAML (1_000 is read as 1000; "),
        (
            "{a: 1,000}",
            "x:1: not valid YAML (a comma begins the next entry: write 1000, not 1,000)",
        ),
        (
            "{a: 0,001}",
            "x:1: not valid YAML (a comma begins the next entry: write 0.001, not 0,001)",
        ),
        (
            "{a: 1,000,000, b: 2}",
            "x:1: not valid YAML (a comma begins the next entry: write 1000000, not 1,000,000)",
        ),
        ("? [a]\n: 1", "x:1: not valid YAML (found unhashable key)"),
        ("a: 1\nb: &a {c: *a}", "x:2: not valid YAML (an alias, *a: "),
        ("[" * 41, "x:1: not valid YAML (nested more than 40 deep)"),
        ('a:\n  "\\0"', "x:2: not valid YAML (a NUL"),
        ("seed: !!int ''", "x: not valid YAML ("),
    ],
)
def test_what_is_refused_is_named_by_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x")
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_no_more_is_read_than_a_config_can_be(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * (1 << 18) + "\n")
    for path in (tmp_path / "large.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"more than 262,144 bytes"):
            read_text(path)


def test_a_misspelt_key_is_named_before_what_it_leaves_out() -> None:
    """The first line is read most; the key under its right name is missing only because of it."""
    first = error_of(SMALLEST.replace("max_steps:", "max_step:")).splitlines()[0]
    assert "train.max_step: unknown key (did you mean max_steps?)" in first
