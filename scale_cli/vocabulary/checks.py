"""Check on a user's own text that a tokenizer with new tokens treats other text as the old one did.

That it does so for every character and for random strings is shown by the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from tokenizers import Tokenizer

from scale_cli.config.vocabulary import Script
from scale_cli.errors import PreservationError

_TEXTS_AT_ONCE = 1 << 10  # a document may be megabytes, and few are


def check_grown_tokenizer(
    old: Tokenizer, new: Tokenizer, script: Script, known: Iterable[str], learned: Sequence[str]
) -> int:
    """Check a tokenizer against the one that it extends; return how many texts were compared.

    Args:
        old: the base's.
        new: the one with new tokens. Old and special tokens must have their ids in it.
        script: of the new tokens. Text must have its old ids where newlines replace the script's
        letters.
        known: text of what the base knows.
        learned: text that the new tokens are for. It must decode from its new ids as from the old
        ones.

    Raises:
        PreservationError: one of these does not hold.
    """
    _check_tokens(old, new)
    old = _copy(old)
    new = _copy(new)
    count = 0
    for text, before, after in _both(old, new, _without(script, old, chain(learned, known))):
        count += 1
        if after != before:
            raise PreservationError(f"method.vocabulary: the tokens of {text[:80]!r} have changed")
    for text, *both in _both(old, new, learned):
        count += 1
        read, read_now = (
            tokenizer.decode(ids, skip_special_tokens=False)
            for tokenizer, ids in zip((old, new), both, strict=True)
        )
        if read != read_now:
            raise PreservationError(
                f"method.vocabulary: decoding the new tokens of {text[:80]!r} gives another text"
            )
    return count


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy for which, as in corpora, a "</s>" in a text is text."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.encode_special_tokens = True
    return copied


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


def _without(script: Script, tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with newlines for the script's letters; skip a text that normalising gives such
    letters.
    """
    letters = re.compile(f"[{script.characters}]+")
    for text in texts:
        other = letters.sub("\n", text)
        read = other if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(other)
        if not letters.search(read):
            yield other


def _both(
    old: Tokenizer, new: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield every text with its ids by both tokenizers."""
    iterator = iter(texts)
    while some := list(islice(iterator, _TEXTS_AT_ONCE)):
        both = (
            tokenizer.encode_batch_fast(some, add_special_tokens=False) for tokenizer in (old, new)
        )
        for text, before, after in zip(some, *both, strict=True):
            yield text, before.ids, after.ids
