"""Byte-pair encoding learned on, from where a tokenizer left off, of one script's letters alone.

What is merged are units: the shortest runs of the tokenizer's own tokens that are whole letters. A unit is one token
where the tokenizer has one, else the tokens of its bytes, which are merged from the left. A merge is kept where its
product can only be a beginning of the script's letters (`Script.alone_begins`), after a space at the most, and is no
token yet. So no text without the script has a new token in it: old merges come first, and no old one takes a new token.

`tokenizers` learns the merges of units. How often each product was ever made follows from how often it is left: every
product that was made of it has taken one. With that, letters and merges are one list, the most frequent first, as if
bytes and units had been learned together; it is cut where enough tokens are in it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers

from scale_cli.config.vocabulary import Script
from scale_cli.vocabulary.extension import NewToken, Spelling

_WORDS_AT_ONCE = 4096  # handed to `tokenizers` in one call
_FIRST_UNIT = 0x10000  # the character that stands for the first unit; surrogates are below

Unit = tuple[str, ...]  # tokens of the tokenizer that make whole letters


def count_words(texts: Iterable[str], tokenizer: Tokenizer, script: Script) -> Counter[str]:
    """Return how often every run of the script's letters, and the space before it, occurs in some texts."""
    run = re.compile(f"[ ▁]?[{script.characters}]+")
    normalizer = tokenizer.normalizer
    words: Counter[str] = Counter()
    for text in texts:
        words.update(run.findall(text if normalizer is None else normalizer.normalize_str(text)))
    return words


def learn(
    words: Mapping[str, int],  # how often each occurs
    tokenizer: Tokenizer,
    spelling: Spelling,  # of its tokens
    script: Script,  # whose letters the words are
    *,
    most: int,
    min_count: int,  # a token that would occur less often in the words is left out
) -> list[NewToken]:
    """Return the tokens that save the most, each after those that it is made of."""
    lines, of_units, spelt = Counter[tuple[Unit, ...]](), Counter[Unit](), dict[str, bytes]()
    for word, encoding in _encoded(tokenizer, sorted(words)):
        space = spelling.space if word[0] in " ▁" else None
        for units in _units(encoding, space, spelling, spelt):
            lines[units] += words[word]
    for units, count in lines.items():
        for unit in units:
            of_units[unit] += count
    frequent = sorted(unit for unit, count in of_units.items() if count >= min_count)
    character = {unit: chr(_FIRST_UNIT + index) for index, unit in enumerate(frequent)}
    whole = {char: spelling.joined(unit) for unit, char in character.items()}
    candidates = [counted for counted in _letters(of_units, spelling) if counted[0] >= min_count]
    for *merged, count in _merges_of_units(lines, character, 2 * most, min_count):
        left, right = ("".join(whole[char] for char in part) for part in merged)
        candidates.append((count, NewToken(left + right, (left, right))))
    candidates.sort(key=lambda counted: -counted[0])  # of equals the one that came first, which the other may hold
    return list(islice(_allowed((new for _, new in candidates), tokenizer, spelling, script), most))


def _encoded(tokenizer: Tokenizer, words: list[str]) -> Iterator[tuple[str, Encoding]]:
    for first in range(0, len(words), _WORDS_AT_ONCE):
        some = words[first : first + _WORDS_AT_ONCE]
        yield from zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True)


def _units(
    encoding: Encoding, space: str | None, spelling: Spelling, spelt: dict[str, bytes]
) -> Iterator[tuple[Unit, ...]]:
    """Yield the units of every part of a word that is merged by itself.

    Before the letters of the first stands `space`, or nothing, whatever the tokenizer puts there before a text.
    """
    units: list[Unit] = []
    unit: list[str] = []
    cut, before = b"", None
    for token, part in zip(encoding.tokens, encoding.word_ids, strict=True):
        if part != before and units:
            yield tuple(units)
            units = []
        before = part
        unit.append(token)
        if token not in spelt:
            spelt[token] = spelling.to_bytes(token)
        cut += spelt[token]
        try:
            letters = cut.decode()
        except UnicodeDecodeError:
            continue
        if letters.strip():
            if space is not None and not letters.startswith(" "):
                units.append((space,))
            space = None
            units.append(tuple(unit))
        unit, cut = [], b""
    if units:
        yield tuple(units)


def _merges_of_units(
    lines: Mapping[tuple[Unit, ...], int], character: Mapping[Unit, str], most: int, min_count: int
) -> list[tuple[str, str, int]]:
    """Return the merges of units as characters, in order, and how often each is made; a rare unit parts a line."""
    counted = Counter[str]()
    for units, count in lines.items():
        for word in "".join(character.get(unit, " ") for unit in units).split():
            counted[word] += count
    words = sorted(word for word in counted if len(word) > 1)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=len(character) + most, min_frequency=max(min_count, 1), show_progress=False, special_tokens=[]
    )
    bpe.train_from_iterator((text for word in words for text in _repeated(word, counted[word])), trainer)
    merges: list[tuple[str, str]] = [(left, right) for left, right in json.loads(bpe.to_str())["model"]["merges"]]
    made = Counter[str]()
    for word, encoding in _encoded(bpe, words):
        for token in encoding.tokens:
            made[token] += counted[word]
    last_first = list({left + right: (left, right) for left, right in reversed(merges)}.values())  # each product once
    for left, right in last_first:
        made[left] += made[left + right]
        made[right] += made[left + right]
    return [(left, right, made[left + right]) for left, right in reversed(last_first)]


def _repeated(word: str, count: int) -> Iterator[str]:
    while count > 0:
        yield " ".join([word] * min(count, _WORDS_AT_ONCE))
        count -= _WORDS_AT_ONCE


def _letters(of_units: Mapping[Unit, int], spelling: Spelling) -> list[tuple[int, NewToken]]:
    """Return the tokens that make one of every unit of several, and how often each is made."""
    if not spelling.byte_level:  # a character is one token at once
        return [(count, NewToken(spelling.joined(unit), None)) for unit, count in of_units.items() if len(unit) > 1]
    made = Counter[Unit]()
    for unit, count in of_units.items():
        for length in range(2, len(unit) + 1):
            made[unit[:length]] += count
    return [
        (count, NewToken("".join(part), ("".join(part[:-1]), part[-1])))
        for part, count in sorted(made.items(), key=lambda item: len(item[0]))
    ]


def _allowed(
    candidates: Iterable[NewToken], tokenizer: Tokenizer, spelling: Spelling, script: Script
) -> Iterator[NewToken]:
    """Yield the candidates that no text without the script can hold, and whose parts are there."""
    known, refused = set(tokenizer.get_vocab(with_added_tokens=True)), set[str]()
    for new in candidates:
        if not script.alone_begins(spelling.to_bytes(new.token)) or refused.intersection(new.merged or ()):
            refused.add(new.token)
        elif new.token not in known:
            known.add(new.token)
            yield new
