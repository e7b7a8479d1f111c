"""New tokens, and not one old id changed, in every kind of tokenizer that can take them."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from scale_cli.config.vocabulary import Script
from scale_cli.errors import BaseModelError, PreservationError
from scale_cli.vocabulary.checks import check_grown_tokenizer
from scale_cli.vocabulary.growing import NewToken, Spelling, extended, pieces
from scale_cli.vocabulary.learning import count_words, learn
from tests.command_line import refused
from tests.vocabulary.sweeps import characters_outside, random_strings
from tests.vocabulary.tokenizers_at_hand import (
    ENGLISH,
    KINDS,
    KOREAN,
    RARE_BYTES,
    llama_3,
    smollm2,
)

HANGUL = Script.named("hangul")
FIRST_ID = 512  # some rows more than any of them has tokens


@dataclass(frozen=True)
class Grown:
    old: Tokenizer
    new: Tokenizer
    pieces: list[list[int]]
    tokens: list[NewToken]


def grown_by(old: Tokenizer, text: str, script: Script, most: int) -> Grown:
    spelling = Spelling.of(old, "a base")
    tokens = learn(count_words(text, old, script), old, spelling, script, most=most, min_count=1)
    new = extended(old, tokens, FIRST_ID)
    return Grown(old, new, pieces(new, spelling, FIRST_ID), tokens)


@functools.cache
def grown(kind: Callable[[], Tokenizer]) -> Grown:
    return grown_by(kind(), KOREAN, HANGUL, most=100)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def in_old_ids(ids: list[int], pieces: list[list[int]]) -> list[int]:
    rows = (pieces[index - FIRST_ID] if index >= FIRST_ID else [index] for index in ids)
    return [old for row in rows for old in row]


any_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# Letters near the script's by their bytes, its own, those that are composed to its own, and
# anything.
letters = st.one_of(
    st.sampled_from(list("안녕하세국민은 앞에")),
    st.characters(min_codepoint=0xAB00, max_codepoint=0xD7FF),
    st.characters(min_codepoint=0x1100, max_codepoint=0x1175),
    st.sampled_from(list(" \n\t.,'_▁Ġ가힣\u00a0é쀀ꀀ")),
    st.characters(max_codepoint=0x7F),
    st.characters(exclude_categories=["Cs"]),
)
texts = st.one_of(
    st.text(letters, max_size=40),
    st.lists(st.sampled_from([*KOREAN.split(), *ENGLISH.split()[:20]])).map(" ".join),
)


@any_kind
@settings(max_examples=60)
@given(text=texts)
@example(text="ᄀ\u1161 각")
@example(text="<|end|> </s> 안녕<s>")
def test_what_is_merged_are_the_old_tokens_in_their_order_and_of_the_script_alone(
    kind: Callable[[], Tokenizer], text: str
) -> None:
    one = grown(kind)
    encoded = one.new.encode(text, add_special_tokens=False)
    assert in_old_ids(encoded.ids, one.pieces) == ids_of(one.old, text)
    to_bytes = Spelling.of(one.old, "a base").to_bytes
    new = {token.token for token in one.tokens} & {*encoded.tokens}
    assert all(HANGUL.alone_begins(to_bytes(token)) for token in new)


@any_kind
def test_new_tokens_save_tokens_and_what_is_written_is_read_back(
    kind: Callable[[], Tokenizer],
) -> None:
    tokenizers = grown(kind)
    before, after = (ids_of(of, KOREAN) for of in (tokenizers.old, tokenizers.new))
    assert len(tokenizers.tokens) == 100
    assert len(after) < len(before) / 2.5
    assert tokenizers.new.decode(after) == tokenizers.old.decode(before) == KOREAN
    assert any(token.token.startswith(("Ġ", "▁")) for token in tokenizers.tokens)
    described = json.loads(tokenizers.new.to_str())
    assert sorted(described["model"]["vocab"].values()) == list(range(FIRST_ID + 100))
    for index, token in tokenizers.old.get_added_tokens_decoder().items():
        assert tokenizers.new.token_to_id(token.content) == index
        assert ids_of(tokenizers.new, token.content) == [index]


@any_kind
def test_no_character_outside_the_script_has_other_ids(kind: Callable[[], Tokenizer]) -> None:
    """Every character of Unicode, fifty lines of one at a time, and random strings of them."""
    one = grown(kind)
    outside = characters_outside(HANGUL)
    lines = ["\n".join(outside[at : at + 50]) for at in range(0, len(outside), 50)]
    texts = [*lines, *random_strings(one.old, outside, seed=0)]
    num_compared = check_grown_tokenizer(one.old, one.new, HANGUL, texts, [KOREAN])
    assert num_compared > 0.9 * len(texts)


def test_the_checks_find_one_token_that_moved_or_that_other_texts_have() -> None:
    one = grown(llama_3)
    left, right = one.old.encode("epoch", add_special_tokens=False).tokens[-2:]
    damaged = extended(one.old, [NewToken(left + right, (left, right))], FIRST_ID)
    for kept, learned in ([ENGLISH, "epoch"], [KOREAN]), ([], [KOREAN, "국민epoch"]):
        with pytest.raises(PreservationError, match="have changed"):
            check_grown_tokenizer(one.old, damaged, HANGUL, kept, learned)
    described = json.loads(one.new.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["h"], vocabulary["e"] = vocabulary["e"], vocabulary["h"]
    moved = Tokenizer.from_str(json.dumps(described))
    with pytest.raises(PreservationError, match="had the id"):
        check_grown_tokenizer(one.old, moved, HANGUL, [], [])


@pytest.mark.parametrize(("byte", "named"), [(0xEA, "ea"), (ord(" "), "20")])
def test_a_tokenizer_without_a_byte_that_the_script_needs_is_refused_by_the_byte(
    byte: int, named: str
) -> None:
    lacking = Spelling(byte_level=True, missing=frozenset({byte, 0xFF}))
    with pytest.raises(BaseModelError, match=rf"no token for the bytes {named}, which"):
        lacking.check(HANGUL, llama_3(), "a base")
    unneeded = Spelling.of(smollm2(), "a base")
    assert sorted(unneeded.missing) == RARE_BYTES
    unneeded.check(HANGUL, smollm2(), "a base")


def test_merges_of_the_same_words_are_the_same_whatever_their_order() -> None:
    old = llama_3()
    spelling = Spelling.of(old, "a base")
    words = count_words(KOREAN, old, HANGUL)
    backwards = dict(reversed(words.items()))

    learned = [learn(w, old, spelling, HANGUL, most=80, min_count=1) for w in (words, backwards)]
    assert learned[0] == learned[1]


def test_each_token_occurs_as_often_as_a_plain_learner_counts() -> None:
    """Against byte-pair encoding by the book, over one line of letters that are one token each."""
    old = grown(llama_3).new  # every letter of the text is a token here
    spelling = Spelling.of(old, "a base")
    line = "국민은국민의국민은국민은법은"
    learned = learn({line: 1}, old, spelling, HANGUL, most=3, min_count=2)
    units = old.encode(line, add_special_tokens=False).tokens

    by_the_book: list[str] = []
    while len(by_the_book) < len(learned):
        pairs = list(itertools.pairwise(units))
        left, right = max(pairs, key=lambda pair: (pairs.count(pair), -pairs.index(pair)))
        by_the_book.append(left + right)
        merged: list[str] = []
        for unit in units:
            if merged and (merged[-1], unit) == (left, right):
                merged[-1] += unit
            else:
                merged.append(unit)
        units = merged
    assert [token.token for token in learned] == by_the_book


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="a"),
        models.WordPiece({"a": 0}, unk_token="a"),
        models.Unigram([("a", 0.0)], 0, byte_fallback=True),
        models.BPE({"a": 0}, []),  # without bytes
        models.BPE({"a": 0}, [], byte_fallback=True, end_of_word_suffix="</w>"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name_in_one_line(model: Any) -> None:
    with refused(BaseModelError, rf"the tokenizer of a base \({type(model).__name__}\) is neither"):
        Spelling.of(Tokenizer(model), "a base")


@settings(max_examples=100)
@given(
    first=st.integers(0x80, 0x10FFFF),
    length=st.integers(0, 70_000),
    cut=st.integers(1, 3),
    inside=st.booleans(),
)
@example(first=0xD802, length=2046, cut=1, inside=True)  # a range that begins among surrogates
def test_bytes_alone_begin_a_script_where_whatever_completes_them_is_of_it(
    first: int, length: int, cut: int, inside: bool
) -> None:
    last = min(first + length, 0x10FFFF)
    script = Script(((first, last),))
    letter = max(last if inside else first - 1, 0x80)
    assume(not 0xD800 <= letter <= 0xDFFF)
    spelt = chr(letter).encode()
    beginning = spelt[: max(cut, len(spelt) - 2)]  # two bytes are missing at the most
    near = (code for code in range(letter - 2**12, letter + 2**12) if 0 <= code < 0x110000)
    completed = [
        c for c in near if not 0xD800 <= c <= 0xDFFF and chr(c).encode().startswith(beginning)
    ]

    expected = all(first <= code <= last for code in completed)
    assert script.alone_begins(beginning) == script.alone_begins(b" " + beginning) == expected
    assert not script.alone_begins(b"a" + beginning)
