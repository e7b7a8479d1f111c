"""Check that a tokenizer with new tokens treats text without their script as the old one did."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from tokenizers import Tokenizer

from scale_cli.config.vocabulary import Script
from scale_cli.errors import PreservationError

_TEXTS_AT_ONCE = 1 << 10  # a document may be megabytes, and few are
_NUM_RANDOM, _LONGEST_RANDOM = 20_000, 24
_CODE_POINTS = range(0x110000)
_NO_CHARACTERS = ("Cn", "Cs")  # of Unicode's categories: not assigned, and surrogates


def check_added_tokens(
    old: Tokenizer,
    new: Tokenizer,
    script: Script,
    kept: Iterable[str],
    learned: Iterable[str],
    seed: int,
) -> int:
    """Check a tokenizer against the one it extends; return how many texts were compared.

    Old and special tokens must keep their ids. Both must give the same ids to every character outside the script, to
    random strings of them, and to the `kept` texts with a newline in place of the script's letters. The `learned`
    texts must decode from their new ids as from the old ones. If not, PreservationError is raised.
    """
    old, new = (
        Tokenizer.from_str(tokenizer.to_str()) for tokenizer in (old, new)
    )  # copies, to change settings
    _check_tokens(old, new)
    characters = (chr(code) for code in _CODE_POINTS if not script.holds(code, code))
    outside = [
        character
        for character in characters
        if unicodedata.category(character) not in _NO_CHARACTERS
    ]
    texts = chain(outside, _random_strings(old, outside, seed), kept)
    return _check_ids(old, new, _without(script, old, texts)) + _check_decoded(old, new, learned)


def check_union(
    parts: Sequence[tuple[Tokenizer, Script]],
    united: Tokenizer,
    first_id: int,
    texts: Sequence[str],
    seed: int,
) -> None:
    """Check a tokenizer with the new tokens of several others, one's after another's, against each of them.

    No two scripts overlap. Texts and random strings without the other scripts must have the ids of each tokenizer, its
    new ids moved by the number of tokens put before them. All texts must decode alike.
    """
    united = Tokenizer.from_str(united.to_str())  # a copy, to change settings
    letters = [
        chr(code)
        for _, script in parts
        for first, last in script.ranges
        for code in range(first, last + 1)
    ]
    all_texts = [*_random_strings(united, letters, seed), *texts]
    before = 0
    for part, script in parts:
        alone = Tokenizer.from_str(part.to_str())
        others = Script(
            tuple(pair for _, other in parts if other is not script for pair in other.ranges)
        )
        _check_ids(alone, united, _without(others, alone, all_texts), first_id, before)
        _check_decoded(alone, united, all_texts)
        before += part.get_vocab_size() - first_id


def _check_tokens(old: Tokenizer, new: Tokenizer) -> None:
    ids = new.get_vocab(with_added_tokens=True)
    for token, index in old.get_vocab(with_added_tokens=True).items():
        if ids.get(token) != index:
            raise PreservationError(
                f"method.vocabulary: the token {token!r} had the id {index}, now {ids.get(token)}"
            )
    added = old.get_added_tokens_decoder()
    if added != new.get_added_tokens_decoder():
        raise PreservationError("method.vocabulary: the special tokens have changed")
    for special in added.values():
        before, after = (
            tokenizer.encode(special.content, add_special_tokens=False).ids
            for tokenizer in (old, new)
        )
        if before != after:
            raise PreservationError(
                f"method.vocabulary: {special.content!r} had the ids {before}, now {after}"
            )


def _check_ids(
    old: Tokenizer, new: Tokenizer, texts: Iterable[str], first_id: int = 0, moved: int = 0
) -> int:
    """Check that texts keep their ids, those from `first_id` on moved by `moved`; return how many were compared."""
    count = 0
    for text, before, after in _both(old, new, texts):
        count += 1
        if after != [index + moved if index >= first_id else index for index in before]:
            raise PreservationError(f"method.vocabulary: the tokens of {text[:80]!r} have changed")
    return count


def _check_decoded(old: Tokenizer, new: Tokenizer, texts: Iterable[str]) -> int:
    """Check that texts decode from their new ids as from their old ones; return how many were compared."""
    count = 0
    for text, before, after in _both(old, new, texts):
        count += 1
        if old.decode(before, skip_special_tokens=False) != new.decode(
            after, skip_special_tokens=False
        ):
            raise PreservationError(
                f"method.vocabulary: decoding the new tokens of {text[:80]!r} gives another text"
            )
    return count


def _random_strings(tokenizer: Tokenizer, outside: list[str], seed: int) -> Iterator[str]:
    """Yield strings of ASCII, white space, the characters `outside`, and the texts of special tokens."""
    draw = random.Random(seed)
    common = [chr(code) for code in range(0x20, 0x7F)] + list(" \n\t\r\u00a0") * 5
    basic = [char for char in outside if ord(char) < 0x10000]
    special = [added.content for added in tokenizer.get_added_tokens_decoder().values()] or [" "]
    for _ in range(_NUM_RANDOM):
        length = draw.randint(1, _LONGEST_RANDOM)
        yield "".join(
            map(
                draw.choice,
                draw.choices((common, basic, outside, special), (6, 4, 1, 0.2), k=length),
            )
        )


def _without(script: Script, tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with newlines for the script's letters; skip a text that normalising gives such letters."""
    letters = re.compile(f"[{script.characters}]+")
    for text in texts:
        other = letters.sub("\n", text)
        read = other if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(other)
        if not letters.search(read):
            yield other


def _both(
    old: Tokenizer, new: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield every text with its ids by both tokenizers; as in corpora, a "</s>" in a text is plain text."""
    iterator = iter(texts)
    for tokenizer in (old, new):
        tokenizer.encode_special_tokens = True
    while some := list(islice(iterator, _TEXTS_AT_ONCE)):
        both = (
            tokenizer.encode_batch_fast(some, add_special_tokens=False) for tokenizer in (old, new)
        )
        for text, before, after in zip(some, *both, strict=True):
            yield text, before.ids, after.ids
