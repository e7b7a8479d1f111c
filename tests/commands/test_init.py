"""`scale init`: what it writes runs as it is, fits what is there, and is never written over anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from scale_cli.commands import init as starter
from scale_cli.commands import plan as plan_module
from scale_cli.commands.init import SCHEMA_FILE, Answers, Sizes, fitting_sizes, starter_text
from scale_cli.commands.plan import plan
from scale_cli.config.load import checked, load_config
from scale_cli.config.safe_yaml import parse
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError
from scale_cli.planning.device import Device
from tests.command_line import Scale
from tests.widening import TINY

CPU = Device("cpu", 1e12, 0.4, "measured on cpu")
SIZES = Sizes(CPU, "bf16", 256, 16, 8, 200, 2**30, 2**34)


def once(count: Callable[..., Any]) -> Callable[..., Any]:
    """Count the one model of all examples once: it hangs on neither time nor memory."""
    known: list[Any] = []

    def counted(*arguments: Any) -> Any:
        if not known:
            known.append(count(*arguments))
        return known[0]

    return counted


COUNTED = {name: once(getattr(starter, name)) for name in ("count_flops", "count_saved_tensors")}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "measured_device", lambda *_: CPU)


@pytest.fixture
def flags(shared_data: Path) -> dict[str, Path | str]:
    return {
        "--base": shared_data / "ckpt-stories260K" / "hf",
        "--corpus": shared_data / "ko-petitions" / "valid.txt.xz",
        "--language": "ko",
        "--retention": shared_data / "en-tinystories" / "tinystories_val.txt",
    }


def flat(flags: dict[str, Path | str]) -> list[Path | str]:
    return [part for pair in flags.items() for part in pair]


def test_what_is_written_can_be_planned_and_holds_out_what_it_trains_on_nowhere(
    flags: dict[str, Path | str], scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "methods_beside", lambda _: [])
    file = tmp_path / "mine.yaml"
    done = scale("init", file, *flat(flags))
    assert (done.exit_code, done.stderr) == (0, "")
    config = load_config(file)
    assert plan(config, flops=1e12, utilisation=None, num_processes=1).methods[0].chosen
    (corpus,), (held_out, retention) = config.corpus.sources, config.evaluation.perplexity
    assert (held_out.role, retention.role, held_out.path) == ("acquisition", "retention", corpus.path)
    assert corpus.skip_documents == held_out.max_documents
    assert file.with_name(SCHEMA_FILE).is_file()
    before = file.read_bytes()
    assert scale("init", file, *flat(flags)).error() == f"{file}: is there already; give another name"
    assert file.read_bytes() == before


def test_what_no_flag_says_is_named_in_one_line_where_nobody_can_be_asked(
    flags: dict[str, Path | str], scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    del flags["--language"]
    done = scale("init", tmp_path / "mine.yaml", *flat(flags))
    assert done.exit_code == 2
    assert done.error().startswith("--language: not given (of that text: ko, de, ...)")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--base", "/absent/base", "/absent/base"),
        ("--corpus", "/absent/*.txt", "corpus: no file matches /absent/*.txt"),
        ("--language", "Korean", "corpus.sources.0.language"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_nothing_is_written(
    flag: str, value: str, said: str, flags: dict[str, Path | str], scale: Scale, tmp_path: Path
) -> None:
    done = scale("init", tmp_path / "mine.yaml", *flat(flags | {flag: value}))
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[0] and done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given_text", "source"),
    [
        ("owner/words", {"dataset": "owner/words"}),
        ("owner/words:kor_Hang", {"dataset": "owner/words", "subset": "kor_Hang"}),
        ("owner/words::test", {"dataset": "owner/words", "split": "test"}),
        ("data/words.txt.xz", {"path": "data/words.txt.xz"}),
        ("data/*.jsonl", {"path": "data/*.jsonl"}),
    ],
)
def test_a_text_is_files_or_a_dataset(given_text: str, source: dict[str, str]) -> None:
    answers = Answers("base", given_text, "ko", given_text, "en", given_text, 5.0)
    tree = parse(starter_text(answers, {"base": "base"}, SIZES, Path("mine.yaml")), "mine.yaml")
    for read in (*tree["corpus"]["sources"], *tree["evaluation"]["perplexity"]):
        assert {key: read[key] for key in ("path", "dataset", "subset", "split") if key in read} == source


@settings(max_examples=50, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40).filter(
        lambda text: "://" not in text
    )
)
def test_any_name_comes_back_out_of_the_yaml_as_it_was_given(name: str) -> None:
    answers = Answers(name, f"{name}.txt", "no", f"{name}.txt", "en", None, 5.0)
    tree = parse(starter_text(answers, {"base": name}, SIZES, Path("mine.yaml")), "mine.yaml")
    assert tree["model"]["base"] == name
    assert tree["corpus"]["sources"][0]["path"] == f"{name}.txt"
    assert tree["corpus"]["sources"][0]["language"] == "no"


@settings(max_examples=12, deadline=None)
@given(flops=st.floats(1e6, 1e16), minutes=st.floats(0.1, 1e5), gib=st.floats(1e-3, 1e3))
def test_sizes_fit_the_memory_the_positions_and_each_other(flops: float, minutes: float, gib: float) -> None:
    base = LlamaConfig(**TINY)
    with pytest.MonkeyPatch.context() as patch:
        for name, count in COUNTED.items():
            patch.setattr(starter, name, count)
        patch.setattr(starter, "measured_device", lambda *_: dataclasses.replace(CPU, flops_per_s=flops))
        patch.setattr(starter, "_memory_bytes", lambda _: int(gib * 2**30))
        try:
            sizes = fitting_sizes(base, minutes)
        except ConfigError as error:
            assert str(error).startswith("--base: needs ")
            return
    assert sizes.memory_bytes <= sizes.available_bytes
    assert sizes.sequence_length <= base.max_position_embeddings
    assert sizes.global_batch_size % sizes.micro_batch_size == 0
    tree = parse(
        starter_text(Answers("b", "c.txt", "ko", "r.txt", "en", None, minutes), {"base": "b"}, sizes, Path("m.yaml")),
        "m",
    )
    assert checked(RunConfig, tree, "m").train.max_steps == sizes.max_steps
