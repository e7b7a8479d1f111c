"""The corpora of a config: what is warned of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import (
    beginning_to_learn,
    build_batches,
    corpus_warnings,
    open_sources,
    text_to_learn,
)
from tests.data.corpus_files import as_jsonl
from tests.small_runs import changed, small_run

WORDS = [f"w{number}" for number in range(60)]
HELD_OUT = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10 w11"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def configured(
    folder: Path, *training: list[str] | str, held_out: list[str] = HELD_OUT, **keys: Any
) -> RunConfig:
    """Return a config of texts to train on: records of a .jsonl, or the content of a .txt."""
    documents = keys.pop("documents", "paragraph")
    sources: list[dict[str, Any]] = []
    for number, texts in enumerate([*training, held_out]):
        path = folder / (f"{number}.txt" if isinstance(texts, str) else f"{number}.jsonl")
        path.write_bytes(texts.encode() if isinstance(texts, str) else as_jsonl(texts))
        sources.append({"name": f"c{number}", "path": str(path), "language": "en"})
    for number, source in enumerate(sources[:-1]):
        source |= {"weight": number + 1.0, "documents": documents}
    return small_run(
        folder,
        "none",
        corpus={"sequence_length": 8, "sources": sources[:-1], "num_workers": 1},
        train={"max_steps": 4, "global_batch_size": 2, "micro_batch_size": 1, **keys},
        evaluation={"perplexity": [sources[-1] | {"name": "held", "role": "retention"}]},
    )


def warned(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    training = open_sources(config, config.corpus.sources, tokenizer)
    return corpus_warnings(
        config, training, open_sources(config, config.evaluation.perplexity, tokenizer)
    )


WHOLE = " ".join(WORDS)
SENTENCES = "".join(f"w{number % 60} w{30 + number % 7}\n" for number in range(12_000))


@pytest.mark.parametrize(
    ("texts", "keys", "line"),
    [
        ([WHOLE], {}, ""),
        (
            ["w30 " + HELD_OUT[0], "  w4\n\nw5 ", HELD_OUT[2], WHOLE, HELD_OUT[2]],
            {"held_out": [*HELD_OUT, HELD_OUT[2]]},
            "corpus held: 3 of its 5 documents (",
        ),
        ([WHOLE, "w1"], {"held_out": [*["w1"] * 4, *[f"{WHOLE} w{n} " * 5 for n in range(4)]]}, ""),
        (
            [f"{WHOLE} " * 9 + "고양이"],
            {},
            "corpus c0: the tokenizer loses 0.48 % of its text, as in '고양이'",
        ),
        (
            [WHOLE],
            {"held_out": HELD_OUT[:1]},
            "corpus held: it has no confidence intervals, with only 1 document to ",
        ),
        (
            [WHOLE],
            {"held_out": HELD_OUT[:2]},
            "corpus held: its confidence intervals are too narrow, with only 2 documents",
        ),
        ([WHOLE], {"schedule": "cosine", "decay_steps": 1}, "train.decay_steps: has no effect"),
        ([WHOLE], {"schedule": "wsd", "decay_steps": 1}, ""),
        ([WHOLE], {"schedule": "constant"}, ""),
        (
            [WHOLE],
            {"schedule": "constant", "min_lr_ratio": 0.5},
            "train.min_lr_ratio: has no effect",
        ),
        ([WHOLE], {"warmup_steps": 40}, "train.warmup_steps 40: more than train.max_steps 4"),
        (SENTENCES, {}, "corpus c0: 1 document of "),
        (SENTENCES, {"documents": "line"}, ""),
        (SENTENCES, {"documents": "file"}, ""),
        (SENTENCES.replace("w1 ", "\nw2 "), {}, ""),
        ("w1 w2\nw3 w4\n", {}, ""),
        (
            "\ufeffw1 w2\r\n\rw3 w4\n",
            {},
            "corpus c0: has 2 CR or CRLF line ends and 1 byte order mark;",
        ),
    ],
)
def test_what_is_doubtful_is_told_and_what_is_common_is_not(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str] | str,
    keys: dict[str, Any],
    line: str,
) -> None:
    lines = warned(configured(tmp_path, texts, **keys), tokenizer)
    assert len(lines) == bool(line) and all(found.startswith(line) for found in lines)


def test_text_that_replay_only_measures_on_is_not_trained_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = configured(tmp_path, [WHOLE], HELD_OUT)
    (line,) = warned(config, tokenizer)
    assert "100.0 % of its text) are in c1, which is trained on" in line
    replayed = changed(config, "corpus.sources.1.role=replay")
    (line,) = warned(replayed, tokenizer)
    assert "are in c1, which is replay: results on them measure memorisation" in line
    assert not warned(changed(replayed, "corpus.sources.1.weight=0"), tokenizer)


def test_shared_documents_are_counted_over_all_of_a_long_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.data.overlap._HASHES_AT_ONCE", 1)
    (line,) = warned(configured(tmp_path, [*HELD_OUT[:2], WHOLE]), tokenizer)
    assert line.startswith("corpus held: 2 of its 4 documents (")


def test_a_corpus_that_is_read_many_times_over_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = configured(tmp_path, [WHOLE], [WHOLE], max_steps=150)
    (line,) = warned(config, tokenizer)  # the other is read 13 times
    assert line.startswith("corpus c1: its 60 tokens are read 25 times;")
    corpora = open_sources(config, config.corpus.sources, tokenizer)
    _, trained = build_batches(config, corpora, 1).trained_tokens(150)
    assert trained.num_trained / (len(corpora[1].ids) - 1) == pytest.approx(
        25, rel=0.3
    )  # sources are drawn


def test_a_start_reads_the_beginning_of_a_text_behind_the_boundary() -> None:
    ids = np.array([5, 6, 5, 2, 7], dtype=np.uint32)
    for boundary, read in ((2, [2, 5, 6, 5, 2, 7]), (5, [5, 6, 5, 2, 7]), (None, [5, 6, 5, 2, 7])):
        text = beginning_to_learn(ids, boundary, 8)
        assert text.sample_ids.tolist() == [read]
        assert text.token_shares.tolist() == [0, 0, 0.2, 0, 0, 0.4, 0.2, 0.2]


def test_a_start_weighs_sources_as_the_config_does_and_is_tried_on_the_largest(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = changed(configured(tmp_path, ["w0 w0"], ["w1 w1"]), "corpus.sources.1.weight=9")
    sources = config.corpus.sources
    text = text_to_learn(sources, open_sources(config, sources, tokenizer), 3)
    assert text.token_shares.tolist() == pytest.approx([0, 0.1, 0.9])
    assert text.sample_ids.tolist() == [[2, 2]]


def test_replay_alone_is_distilled(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = changed(
        configured(tmp_path, [WHOLE], [WHOLE]),
        "corpus.sources.1.role=replay",
        "method={variant: preserve, distillation: {weight: 0.5}}",
    )
    corpora = open_sources(config, config.corpus.sources, tokenizer)
    assert build_batches(config, corpora, 1).distillation == [0.0, 0.5]
