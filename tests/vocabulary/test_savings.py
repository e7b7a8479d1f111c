"""What new tokens would save is told from a sample."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scale_cli.vocabulary.savings import estimate_savings, most_frequent_script
from tests.data.corpus_files import read
from tests.vocabulary.tokenizers_at_hand import ENGLISH, KOREAN, RUSSIAN


def test_an_estimate_from_a_tenth_is_near_what_the_whole_text_gives(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "ckpt-novels-en/hf")
    text = "\n\n".join(read(shared_data / "ko-petitions/valid.txt.xz"))[:400_000]
    estimates = [
        estimate_savings(tokenizer, 8192, text[:length], most=1000) for length in (40_000, 400_000)
    ]
    few, many = (found for found in estimates if found is not None)
    assert few.script == many.script == "hangul"
    assert few.bytes_per_token == pytest.approx(many.bytes_per_token, rel=0.05)
    assert few.bytes_per_token_with_new == pytest.approx(many.bytes_per_token_with_new, rel=0.15)
    assert many.bytes_per_token_with_new > 2 * many.bytes_per_token


def test_the_script_is_the_most_frequent_one_beyond_ascii() -> None:
    assert most_frequent_script(KOREAN + RUSSIAN[:20] + ENGLISH) == "hangul"
    assert most_frequent_script(RUSSIAN + ENGLISH) == "cyrillic"
    assert most_frequent_script(ENGLISH) is None
