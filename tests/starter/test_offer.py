"""New tokens are offered by a sample of a text."""

from dataclasses import replace
from pathlib import Path

import pytest

from scale_cli.config.schema import ModelConfig
from scale_cli.data.encoding import Encoder
from scale_cli.starter import texts
from scale_cli.starter.offer import most_frequent_script, offer_tokens
from scale_cli.starter.texts import look_into
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN, RUSSIAN


def test_an_offer_from_a_tenth_is_near_that_from_a_larger_sample_and_no_key_where_the_base_may_know(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-novels-en/hf")))
    monkeypatch.setattr(texts, "_SAMPLED", 400_000)
    path = str(shared_data / "ko-petitions/valid.txt.xz")
    source = {"name": "petitions", "path": path, "language": "ko"}
    large = look_into(source, Encoder(tokenizer, conversations=False), "--corpus")
    small = replace(large, sample=large.sample[: len(large.sample) // 10])
    few, many = (offer_tokens(text, tokenizer, 8192, is_unknown=True) for text in (small, large))
    assert few.script == many.script == "hangul"
    assert few.tokens_per_byte == pytest.approx(many.tokens_per_byte, rel=0.25)
    assert many.tokens_per_byte < large.tokens_per_byte / 2
    perhaps_known = offer_tokens(small, tokenizer, 8192, is_unknown=False)
    assert (perhaps_known.number, perhaps_known.offered) == (0, few.number)


def test_the_script_is_the_most_frequent_one_beyond_ascii() -> None:
    assert most_frequent_script(KOREAN + RUSSIAN[:20] + ENGLISH) == "hangul"
    assert most_frequent_script(RUSSIAN + ENGLISH) == "cyrillic"
    assert most_frequent_script(ENGLISH) is None
