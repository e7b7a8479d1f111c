"""The corpora of a config: what is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.config.schedule import learning_rate
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import (
    build_batches,
    corpus_warnings,
    idle_settings,
    open_sources,
)

WORDS = [f"w{number}" for number in range(60)]
HELD_OUT = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10 w11"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def configured(folder: Path, training: list[list[str]], held_out: list[str], **train: Any) -> RunConfig:
    for number, texts in enumerate([*training, held_out]):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    sources: list[dict[str, Any]] = [
        {"name": f"c{n}", "path": str(folder / f"{n}.jsonl"), "language": "en", "weight": n + 1.0}
        for n in range(len(training))
    ]
    held = {"name": "held", "path": str(folder / f"{len(training)}.jsonl"), "language": "en", "role": "retention"}
    return RunConfig.model_validate(
        {
            "output_dir": folder / "run",
            "model": {"base": "none"},
            "corpus": {"sequence_length": 8, "sources": sources, "num_workers": 1},
            "train": {"max_steps": 4, "global_batch_size": 2, "micro_batch_size": 1, **train},
            "evaluation": {"perplexity": [held]},
        }
    )


def warned(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    training = open_sources(config, config.corpus.sources, tokenizer)
    return corpus_warnings(config, training, open_sources(config, config.evaluation.perplexity, tokenizer))


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_short_trial_of_a_long_config_ends_while_it_warms_up_and_says_so(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, schedule: str
) -> None:
    config = configured(tmp_path, [[" ".join(WORDS)]], HELD_OUT, warmup_steps=40, schedule=schedule)
    (line,) = warned(config, tokenizer)
    assert "train.warmup_steps 40: more than train.max_steps 4" in line
    rates = [learning_rate(step, config.train) for step in range(4)]
    assert rates == pytest.approx([config.train.lr * (step + 1) / 40 for step in range(4)])


def test_settings_that_come_to_nothing_are_named(tmp_path: Path) -> None:
    for schedule, named in (("cosine", ["decay_steps"]), ("wsd", [])):
        config = configured(tmp_path, [[" ".join(WORDS)]], HELD_OUT, schedule=schedule, decay_steps=1)
        assert [line.partition(":")[0] for line in idle_settings(config)] == [f"train.{key}" for key in named]


def test_a_corpus_that_is_read_many_times_over_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = configured(tmp_path, [[" ".join(WORDS)], [" ".join(WORDS)]], HELD_OUT, max_steps=150)
    (line,) = warned(config, tokenizer)
    assert "corpus c0" not in line  # 13 times
    assert line.startswith("corpus c1: its 60 tokens are read 25 times;")
    corpora = open_sources(config, config.corpus.sources, tokenizer)
    _, trained = build_batches(config, corpora, 1).trained_tokens(150)
    assert trained.num_trained / (len(corpora[1].ids) - 1) == pytest.approx(25, rel=0.3)  # sources are drawn


def test_shared_and_lost_text_and_one_document_are_told_and_what_is_common_is_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    whole, shared = " ".join(WORDS), ["w30 " + HELD_OUT[0], "  w4\n\nw5 ", HELD_OUT[2], " ".join(WORDS), HELD_OUT[2]]
    told: list[tuple[list[str], list[str], str]] = [
        ([whole], HELD_OUT, ""),
        (
            shared,
            [*HELD_OUT, HELD_OUT[2]],
            "held-out held: 3 of its 5 documents (60.0 %) are in c0, which is trained on",
        ),
        (
            [f"{' '.join(WORDS * 9)} 고양이"],
            HELD_OUT,
            "corpus c0: the tokenizer loses 0.48 % of its text, as in '고양이'",
        ),
        ([whole], HELD_OUT[:1], "held-out held: has only one document,"),
    ]
    for training, held_out, line in told:
        lines = warned(configured(tmp_path, [training], held_out), tokenizer)
        assert len(lines) == bool(line) and all(found.startswith(line) for found in lines)


def test_a_text_without_blank_lines_says_how_documents_are_told_apart(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sentences = "".join(f"w{number % 60} w{number % 7}\n" for number in range(12_000))
    text = {"one": sentences, "parted": sentences.replace("w1 ", "\nw2 "), "small": "w1 w2\nw3 w4\n"}
    tree = configured(tmp_path, [HELD_OUT], HELD_OUT).model_dump(mode="json", exclude={"corpus"})
    for name, of_file, documents, told in [
        ("one", "one", "paragraph", True),
        ("by_line", "one", "line", False),
        ("by_file", "one", "file", False),
        ("parted", "parted", "paragraph", False),
        ("small", "small", "paragraph", False),
    ]:
        (tmp_path / f"{of_file}.txt").write_text(text[of_file], encoding="utf-8")
        source = {"name": name, "path": str(tmp_path / f"{of_file}.txt"), "language": "en", "documents": documents}
        config = RunConfig.model_validate({**tree, "corpus": {"sequence_length": 8, "sources": [source]}})
        lines = [line for line in warned(config, tokenizer) if "documents: line" in line]
        assert [line.partition(" of ")[0] for line in lines] == [f"corpus {name}: 1 document"] * told
        assert all("documents: file" in line for line in lines)
