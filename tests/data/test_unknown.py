"""What a tokenizer does not give back is counted, and too much is refused: bits/byte would be of another text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.corpora import check_sample
from scale_cli.data.encoding import Document, Encoder, RoundTrip, TokenizerSpec, _gives_all_back
from scale_cli.data.ledger import Ledger
from scale_cli.data.tokens import TokenCache, TokenisedCorpus
from scale_cli.errors import CorpusError
from tests.vocabulary.tokenizers_at_hand import BROKEN, ENGLISH, KINDS, KOREAN, RUSSIAN, llama_3, qwen

JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。ｶﾞﾗｽ、㍿、①、Ａ"
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


def source_of(folder: Path, texts: list[str], **options: Any) -> TextSource:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return TextSource(name="news", path=str(path), language="ko", **options)


def opened(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast, **reading: float) -> TokenisedCorpus:
    limits = ReadingConfig.model_validate({"num_workers": 1, **reading})
    return TokenCache(folder / "cache", tokenizer, limits).open(source_of(folder, texts))


@pytest.mark.parametrize("broken", BROKEN)
def test_a_tokenizer_that_drops_a_script_is_refused_by_a_sample_and_by_the_whole(
    tmp_path: Path, broken: Callable[[], Tokenizer]
) -> None:
    tokenizer, texts = PreTrainedTokenizerFast(tokenizer_object=broken()), [KOREAN] * 3
    message = r"news \(.*\): the tokenizer loses \d+\.\d % of its text, as in '안녕하세요', more than "
    with pytest.raises(CorpusError, match=message):
        check_sample(source_of(tmp_path, texts), tokenizer, ReadingConfig())
    with pytest.raises(CorpusError, match=message):
        opened(tmp_path, texts, tokenizer)
    assert opened(tmp_path, texts, tokenizer, max_unknown_fraction=1.0).ledger.round_trip.num_lost > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_knows_every_byte_loses_nothing(tmp_path: Path, kind: Callable[[], Tokenizer]) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind())
    texts = [ENGLISH, KOREAN, RUSSIAN, JAPANESE]
    assert opened(tmp_path, texts, tokenizer).ledger.round_trip.num_lost == 0


NORMAL_FORMS = {
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "lower": normalizers.Lowercase(),
    "BERT": normalizers.BertNormalizer(clean_text=True, strip_accents=True, lowercase=True),
    "spaces": normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "")]),
}


@pytest.mark.parametrize("form", NORMAL_FORMS)
@settings(max_examples=30, deadline=None)
@given(
    st.text(
        st.one_of(
            st.sampled_from(ENGLISH + KOREAN + RUSSIAN + JAPANESE + "ㅋㅋㅠㅠéß☺…〜"),
            st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cn", "Co"], exclude_characters="\ufffd"),
        ),
        min_size=1,
    )
)
def test_no_normal_form_is_a_loss(form: str, text: str) -> None:
    tokenizer = qwen()
    tokenizer.normalizer = NORMAL_FORMS[form]
    encoder = Encoder(TokenizerSpec(tokenizer.to_str(), before=(), after=(), dtype="uint16"))
    assert encoder.encode([Document(text, len(text.encode()))]).round_trip.num_lost == 0


def with_a_letter_that_is_decoded_as_a_byte() -> Tokenizer:
    tokenizer = llama_3()
    tokenizer.add_tokens(["é"])
    return tokenizer


def with_a_step_that_drops() -> Tokenizer:
    tokenizer = llama_3()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return tokenizer


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("a é<|end|>Ġ가"), min_size=1))
def test_where_no_round_trip_is_asked_for_every_text_comes_back(text: str) -> None:
    tokenizer = llama_3()
    assert _gives_all_back(json.loads(tokenizer.to_str()))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", [*KINDS[1:], *BROKEN, with_a_letter_that_is_decoded_as_a_byte, with_a_step_that_drops])
def test_a_round_trip_is_asked_of_every_other_tokenizer(kind: Callable[[], Tokenizer]) -> None:
    assert not _gives_all_back(json.loads(kind().to_str()))


@pytest.mark.parametrize("model", MODELS)
def test_what_stands_for_unknown_text_gives_none_of_it_back(tmp_path: Path, model: str) -> None:
    texts = ["a cat sat", "고양이 cat", "a 개"]
    ledger = opened(tmp_path, texts, tokenizer_of(model), max_unknown_fraction=1.0).ledger
    # 7 of 10 letters of 13 bytes, for a syllable has two or three, and 2 of 3 of 5 bytes
    assert ledger.round_trip == RoundTrip(ledger.kept.num_bytes, num_lost=10 + 4, example="고양이")
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


def test_a_corpus_that_the_tokenizer_does_not_know_is_refused_by_its_share(tmp_path: Path) -> None:
    texts = ["a cat sat"] * 99 + ["a 가나가나"]  # 8 of 9 letters of 14 bytes
    tokenizer = tokenizer_of("words", bos_token="<unk>", eos_token="<unk>")  # a mark at a border is not unknown text
    with pytest.raises(CorpusError, match=r"loses 1\.4 % .*'가나가나'.*max_unknown_fraction 0\.01"):
        opened(tmp_path, texts, tokenizer)
    assert opened(tmp_path, texts, tokenizer, max_unknown_fraction=0.015).ledger.round_trip.num_lost == 13


def test_a_sample_refuses_by_the_share_only_where_it_is_the_whole(tmp_path: Path) -> None:
    lost, known = ["a 가나"] * 20, ["a cat sat"] * 1000  # some 2 to 4 %
    tokenizer, reading = tokenizer_of("words"), ReadingConfig(max_unknown_fraction=0.001)
    with pytest.raises(CorpusError, match="the tokenizer loses"):
        check_sample(source_of(tmp_path, lost + known), tokenizer, reading)
    check_sample(source_of(tmp_path, lost * 2 + known * 2), tokenizer, reading)


def test_a_sample_has_text_of_every_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat sat")
    (tmp_path / "b.txt").write_text("고양이 한 마리", encoding="utf-8")
    source = TextSource(name="news", path=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], language="ko")
    with pytest.raises(CorpusError, match="'고양이'"):
        check_sample(source, tokenizer_of("words"), ReadingConfig())
