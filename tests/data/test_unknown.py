"""What a tokenizer has no id for is counted, and too much of it refused: bits/byte would be those of another text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.ledger import Ledger
from scale_cli.data.tokens import TokenisedCorpus, tokenised
from scale_cli.errors import CorpusError

WORDS = ["<unk>", "a", "cat", "sat"]
MODELS: dict[str, Any] = {
    "words": lambda: models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"),
    "pieces": lambda: models.Unigram([(word, -1.0) for word in WORDS], unk_id=0, byte_fallback=False),
    "characters": lambda: models.BPE({"<unk>": 0, "a": 1, "c": 2, "t": 3, "s": 4}, [], unk_token="<unk>"),
}


def tokenizer_of(model: str, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(MODELS[model]())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def opened(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast, **reading: float) -> TokenisedCorpus:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    source = TextSource(name="news", path=str(path), language="ko")
    limits = ReadingConfig.model_validate({"num_workers": 1, **reading})
    return tokenised(source, tokenizer, folder / "cache", show_progress=False, reading=limits)


@pytest.mark.parametrize("model", MODELS)
def test_every_id_that_stands_for_unknown_text_is_in_the_ledger(tmp_path: Path, model: str) -> None:
    corpus = opened(tmp_path, ["a cat sat", "고양이 cat", "a 개"], tokenizer_of(model), max_unknown_fraction=1.0)
    assert corpus.ledger.num_unknown_tokens == int((corpus.ids == 0).sum()) > 0
    assert corpus.ledger.unknown_fraction == (corpus.ids == 0).mean()
    assert Ledger.from_json(json.loads(json.dumps(corpus.ledger.to_json()))) == corpus.ledger


def test_a_mark_at_a_border_is_not_unknown_text(tmp_path: Path) -> None:
    """As in GPT-2, where one token is the beginning, the end and the unknown."""
    tokenizer = tokenizer_of("words", bos_token="<unk>", eos_token="<unk>", unk_token="<unk>")
    corpus = opened(tmp_path, ["a cat sat"], tokenizer)
    assert corpus.ledger.num_unknown_tokens == 0


def test_a_corpus_that_the_tokenizer_does_not_know_is_refused_by_its_share(tmp_path: Path) -> None:
    texts = ["a cat sat"] * 32 + ["a 고양이"]  # one unknown token of 98
    with pytest.raises(CorpusError, match=r"news \(.*\): 1\.0 % of its tokens are <unk>.*max_unknown_fraction 0\.01"):
        opened(tmp_path, texts, tokenizer_of("words"))
    assert opened(tmp_path, texts, tokenizer_of("words"), max_unknown_fraction=0.011).ledger.num_unknown_tokens == 1
    assert opened(tmp_path, ["a cat sat"] * 33 + texts, tokenizer_of("words")).ledger.num_unknown_tokens == 1


def test_a_folder_of_an_earlier_version_is_read_without_a_count(tmp_path: Path) -> None:
    told = opened(tmp_path, ["a cat"], tokenizer_of("words")).ledger.to_json()
    del told["num_unknown_tokens"]
    ledger = Ledger.from_json(told)
    assert (ledger.num_unknown_tokens, ledger.unknown_fraction) == (None, 0.0)
