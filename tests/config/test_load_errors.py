"""Every wrong config is one clear error: field, place, and what was meant."""

import re
from pathlib import Path

import pytest

from scale_cli.config.load import load_config
from scale_cli.errors import ConfigError
from tests.small_runs import SMALLEST, error_of, load_text

REPLAY = "corpus.sources=[{name: a, path: a.txt, language: ko}, {name: b, path: b.txt, language: en, role: replay}]"
INT8 = "model.quantisation=int8"
RETENTION = "evaluation.perplexity=[{name: a, path: a.txt, language: en, role: retention}]"
DISTILS, BOUNDED = "method.distillation.weight=1", "train.embedding_norm=bounded"
TWIN = "{name: twin, path: a.txt, language: en}"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        # keys that pydantic uses itself
        (["str=1"], ": str: unknown key"),
        (["train.int=1"], ": train.int: unknown key"),
        (["method.expansion.zzzzz=1"], ": method.expansion.zzzzz: unknown key"),
        (["corpus.sources.0.a[0]=1"], ": corpus.sources.0.a[0]: unknown key"),
        # types and ranges
        (["seed=true"], ": seed: "),
        (["method.expansion.ratio='0.25'"], ": method.expansion.ratio: "),
        (["method.collaboration.layers=top:0"], ": method.collaboration.layers: "),
        (["corpus.sources=[]"], ": corpus.sources: "),
        (["corpus.sources.0.weight=0"], ": corpus.sources.0.weight: "),
        (["corpus.sources.0.dataset=some/set"], ": corpus.sources.0: "),
        (["corpus.sources.0.path=~"], ": corpus.sources.0: "),
        (["corpus.sources.0.language=no"], 'write it in quotes: "no"'),
        (
            ["corpus.sources.0={name: a, dataset: x, language: en, documents: file}"],
            ": corpus.sources.0: ",
        ),
        (["corpus.sources.0.revision=main"], ": corpus.sources.0: revision: is for a dataset"),
        (["corpus.sources.0.subset=test"], ": corpus.sources.0: subset: is for a dataset"),
        (
            ["corpus.sources.0.text_field=a", "corpus.sources.0.messages_field=b"],
            "one of text_field and messages_field",
        ),
        (["train.lr=.nan"], ": train.lr: "),
        (["train.micro_batch_size=5"], ": train: "),
        (["export.format=[plain, gguf]"], ": export.format.1: "),
        (["export.format=adapter", "export.dtype=float16"], ": export: dtype: an adapter"),
        (
            ["method.variant=lora", "export.dtype=bfloat16"],
            "leave dtype out, or set format: plain",
        ),
        (["export.format=[]"], ": export.format: "),
        (
            ["evaluation.benchmarks=[{name: a, path: b.csv, language: en}]"],
            ": evaluation.benchmarks.0.path: ",
        ),
        ([REPLAY.replace("role: replay", "weight: 0")], "0 is below 1e-06"),
        ([f"corpus.sources=[{TWIN}, {TWIN}]"], ": corpus.sources: two sources are named 'twin'"),
        (
            ["evaluation.benchmarks=[kobest, kobest]"],
            ": evaluation.benchmarks: two sources are named 'kobest'",
        ),
        # keys that do not go together
        (
            ["method.variant=preserve", "method.collaboration.layers=top:1"],
            "method: collaboration.layers: ",
        ),
        ([BOUNDED, "method.variant=full"], "train.embedding_norm: full has no E'"),
        (
            [DISTILS, REPLAY, "method.variant=full"],
            "distillation.weight: full does not keep the base",
        ),
        ([DISTILS, REPLAY, "method.collaboration.layers=top:1"], "collaborating layers"),
        (
            [DISTILS],
            "distillation.weight: acts only on replay; give one of corpus.sources the role",
        ),
        (
            [REPLAY, "corpus.sources.0.role=replay"],
            "corpus.sources: every source has the role replay",
        ),
        (
            [INT8, "train.compile=true"],
            "train.compile: true does not go with model.quantisation: int8",
        ),
        (
            [INT8, "train.sharding=expansion"],
            "train.sharding: expansion does not go with model.quantisation: int8",
        ),
        (
            [INT8, "train.sharding=all"],
            "train.sharding: all does not go with model.quantisation: int8",
        ),
        (
            ["train.schedule=wsd", "train.warmup_steps=6", "train.decay_steps=5"],
            "together more than max_steps 10",
        ),
        (["train.max_forgetting=0.1"], "train.max_forgetting: needs periodic evaluations"),
        (
            ["train.max_forgetting=0.1", "train.eval_every_steps=5", RETENTION],
            "evaluation.perplexity has no corpus of role acquisition",
        ),
        (
            ["train.eval_every_steps=5"],
            "train.eval_every_steps: evaluation.perplexity names no text to measure",
        ),
        (["train.eval_benchmarks_every_steps=5"], "`scale evaluate CHECKPOINT` measures"),
        (["train.eval_max_items=5"], "`scale evaluate CHECKPOINT` measures"),
        (
            ["method.vocabulary={sources: [x]}"],
            "method.vocabulary.sources: 'x' is not one of corpus.sources (news)",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_its_field(overrides: list[str], told: str) -> None:
    message = error_of(SMALLEST, *overrides)
    assert told in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.max_steps=1e3", "train.max_steps: input should be a valid integer; write 1000"),
        ("train.max_steps=1,000", "a valid integer; write 1000"),
        ("train.max_steps=1 000 000", "a valid integer; write 1000000"),
        ("train.max_steps='10'", "a valid integer; write 10"),
        ("train.max_steps=08", "a valid integer; write 8"),
        (
            "train.max_steps=yes",
            "YAML reads a bare yes, no, on, off, true or false as a truth value",
        ),
        ("train.max_steps=0o10", "a valid integer"),
        ("train.max_steps=010", "010 is read as 8; write a number in plain digits"),
        ("model.revision=no", "so write it in quotes: 'model.revision=\"no\"'"),
        ("model.revision=0010", "a text in quotes): 'model.revision=\"0010\"'"),
        ("model.revision=1234567", "write it in quotes: 'model.revision=\"1234567\"'"),
        ("corpus.sources.0.name=on", "in quotes: 'corpus.sources.0.name=\"on\"'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_to_write(override: str, told: str) -> None:
    message = error_of(SMALLEST, override)
    assert told in message and "\n" not in message


@pytest.mark.parametrize("layers", ["none", "[]", "~"])
def test_a_model_without_collaborating_layers_distils(layers: str) -> None:
    variant = ("method.variant=preserve", f"method.collaboration.layers={layers}")
    assert load_text(SMALLEST, *variant, DISTILS, REPLAY).method.distils


def test_every_error_of_a_file_is_told_at_once_each_once() -> None:
    lines = error_of(SMALLEST, "sede=1", "train.lr=fast", "export.format=gguf").splitlines()
    assert len(lines) == len(set(lines)) == 3
    told = error_of("model: {}\ntrain: {}\n")
    assert re.findall(r": (\S+): required", told) == [
        "output_dir",
        "model.base",
        "corpus",
        "train.max_steps",
    ]


def test_a_file_that_cannot_be_read_or_is_no_mapping_is_named_with_the_line_where_it_has_one(
    tmp_path: Path,
) -> None:
    def told(content: bytes) -> str:
        (path := tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value).removeprefix(str(path))

    assert told(SMALLEST.encode() + b"a: b: c\n").startswith(
        f":{len(SMALLEST.splitlines()) + 1}: not valid YAML"
    )
    for content in (b"", b"# nothing\n", b"- a\n", b"a string", b"3"):
        assert told(content) == ": a config must be a mapping of keys to values"
    assert told(b"output_dir: caf\xe9\n").startswith(": cannot be read as UTF-8 text")
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: "):
            load_config(path)
