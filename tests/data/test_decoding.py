"""A continuation decoded after its prompt, token by token: together they are the text, wherever it
is cut.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.data.decoding import before_cut_character, text_pieces
from tests.vocabulary.tokenizers_at_hand import llama_2, llama_3, unigram

# U+FFFD stands for bytes that are no character, so it cannot stand for itself.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1)


@functools.cache
def opened(make: Callable[[], Tokenizer]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make())


@pytest.mark.parametrize("make", [llama_3, llama_2, unigram])
@settings(max_examples=150)
@given(before=TEXTS, after=TEXTS)
@example(before="국민", after="은 법 앞에")
def test_no_text_is_lost_between_a_prompt_and_its_continuation(
    make: Callable[[], Tokenizer], before: str, after: str
) -> None:
    tokenizer = opened(make)
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    ids = [*prompt, *tokenizer(after, add_special_tokens=False).input_ids]
    whole, begun = str(tokenizer.decode(ids)), str(tokenizer.decode(prompt))
    assert begun + "".join(text_pieces(tokenizer, prompt, ids[len(prompt) :])) == whole


@pytest.mark.parametrize("make", [llama_3, llama_2, unigram])
def test_half_a_character_is_left_out_wherever_it_stands(make: Callable[[], Tokenizer]) -> None:
    tokenizer = opened(make)
    spelling = bytes_to_unicode() if make is llama_3 else {b: f"<0x{b:02X}>" for b in range(256)}
    half: Any = tokenizer.convert_tokens_to_ids([spelling[byte] for byte in b"\xed\x95"])
    prompt, new = (
        tokenizer(text, add_special_tokens=False).input_ids for text in ("국민 a", " 은 법")
    )
    told = "".join(text_pieces(tokenizer, prompt, new))
    for ids, times in (([*new, *half], 1), ([*half, *new], 1), ([*new, *half, *new], 2)):
        assert "".join(text_pieces(tokenizer, prompt, ids)) == told * times
    assert before_cut_character(tokenizer, [*prompt, *half]) == prompt
