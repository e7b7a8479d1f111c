"""A continuation decoded after its prompt, token by token: together they are the text, wherever it
is cut.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.data.decoding import before_cut_character, text_pieces
from tests.vocabulary.tokenizers_at_hand import (
    RARE_BYTES,
    llama_2,
    llama_3,
    mistral,
    smollm2,
    unigram,
)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
# As a model may give them: of characters, whole and cut, and of none.
PARTS = [bytes([byte]) for byte in b"\x80\xc0\xe0\xed\xf0\xf5\xff"]
PARTS += [bytes([byte]) for byte in "국é😀".encode()] + ["국".encode(), b" a", b"b"]
BYTE_LEVEL = (llama_3, smollm2)
KINDS = [*BYTE_LEVEL, llama_2, mistral, unigram]


@functools.cache
def opened(make: Callable[[], Tokenizer]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make())


@pytest.mark.parametrize("make", KINDS)
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


def ids_of(make: Callable[[], Tokenizer], parts: Sequence[bytes]) -> list[int]:
    """Ids of bytes one by one, and of words."""
    spelling = bytes_to_unicode() if make in BYTE_LEVEL else {b: f"<0x{b:02X}>" for b in range(256)}
    space = "Ġ" if make in BYTE_LEVEL else "▁"
    words = {word: word.decode().replace(" ", space) for word in (b" a", b"b")}
    tokens = [
        token
        for part in parts
        for token in ([words[part]] if part in words else [spelling[byte] for byte in part])
    ]
    ids: Any = opened(make).convert_tokens_to_ids(tokens)
    assert None not in ids
    return list(ids)


def begins_a_character(content: bytes) -> bool:
    """Whether more bytes could make it one, or half of a surrogate pair, for which Python waits."""
    for length in range(1, 5 - len(content)):
        for tail in product(b"\x80\x8f\x90\x9f\xa0\xbf", repeat=length):
            with suppress(UnicodeDecodeError):
                return len((content + bytes(tail)).decode(errors="surrogatepass")) == 1
    return False


def one_by_one(content: bytes) -> str:
    """Decode as SentencePiece does, but for the beginning of a character at the very end."""
    text = ""
    while content and not begins_a_character(content):
        lengths = [n for n in range(1, 5) if "\ufffd" not in content[:n].decode(errors="replace")]
        length = lengths[0] if lengths else 1
        text += content[:length].decode(errors="replace")
        content = content[length:]
    return text


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=150)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
@example(parts=[b"\xec", b"\x88", "안녕하세요".encode()])
def test_a_wrong_byte_is_one_sign_and_costs_nothing_after_it(
    make: Callable[[], Tokenizer], parts: list[bytes]
) -> None:
    if make is smollm2:  # which lacks these
        parts = [part for part in parts if part[0] not in RARE_BYTES]
    tokenizer = opened(make)
    new = ids_of(make, parts)
    wanted = one_by_one(b"".join(parts))
    prompt = tokenizer("국민 a", add_special_tokens=False).input_ids
    assert "".join(text_pieces(tokenizer, prompt, new)) == wanted
    alone = "".join(text_pieces(tokenizer, [], new))
    assert alone == wanted or " " + alone == wanted


@pytest.mark.parametrize("make", KINDS)
def test_the_beginning_of_a_character_at_the_end_waits_for_the_rest(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = opened(make)
    prompt = tokenizer("국민 a", add_special_tokens=False).input_ids
    first, *rest = ids_of(make, ["한".encode()])
    assert text_pieces(tokenizer, prompt, [first, *rest]) == ["", "", "한"]
    assert text_pieces(tokenizer, prompt, [first, first]) == ["", "\ufffd"]
    assert before_cut_character(tokenizer, [*prompt, first, rest[0]]) == prompt
