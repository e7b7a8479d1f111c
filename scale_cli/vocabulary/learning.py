"""Learn new tokens for one script from the words of a text.

Learning continues byte-pair encoding from a tokenizer's own merges, on the letters of the script
only.

It merges units: the shortest runs of the tokenizer's tokens that are whole letters. A unit is one
token if the tokenizer has one for the letter, else the tokens of its bytes, which are merged from
the left. A merge is kept if its product is a new token and can only begin the script's letters
(`Script.alone_begins`), after at most one space. So a text without the script never contains a
new token: old merges come first, and none of them takes a new token.

`tokenizers` learns the merges of units. The count of a product is how often it remains, plus the
counts of all products made from it. By these counts, letters and merges form one list, the most
frequent first, as if bytes and units had been learned together; the list is cut when it has
enough tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby, islice
from operator import itemgetter

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers

from scale_cli.config.vocabulary import Script
from scale_cli.vocabulary.growing import NewToken, Spelling

_WORDS_AT_ONCE = 4096  # passed to `tokenizers` in one call
_FIRST_UNIT = 0x10000  # the character for the first unit, above the surrogates

Unit = tuple[str, ...]  # tokens of the tokenizer that together are whole letters
Counted = tuple[int, NewToken]


def count_words(text: str, tokenizer: Tokenizer, script: Script) -> Counter[str]:
    """Count every run of the script's letters in a text, each with the space before it."""
    normal = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    return Counter(re.findall(f"[ ▁]?[{script.characters}]+", normal))


def learn(
    words: Mapping[str, int],  # with their counts
    tokenizer: Tokenizer,
    spelling: Spelling,  # of its tokens
    script: Script,  # of the words' letters
    *,
    most: int,
    min_count: int,  # a token that occurs less often in the words is left out
) -> list[NewToken]:
    """Return up to `most` tokens, the most frequent first, each after the tokens that it is made
    of.
    """
    to_bytes = cache(spelling.to_bytes)
    lines = Counter[tuple[Unit, ...]]()
    of_units = Counter[Unit]()
    for word, encoding in _encoded(tokenizer, sorted(words)):
        space = spelling.space if word[0] in " ▁" else None
        for units in _units(encoding, space, to_bytes):
            lines[units] += words[word]
            for unit in units:
                of_units[unit] += words[word]

    frequent = sorted(unit for unit, count in of_units.items() if count >= min_count)
    candidates = [counted for counted in _letters(of_units, spelling) if counted[0] >= min_count]
    candidates += _merges_of_units(lines, frequent, spelling, most=2 * most, min_count=min_count)
    # Stable: of equals, the later may contain the earlier.
    candidates.sort(key=lambda counted: -counted[0])
    return list(islice(_allowed((new for _, new in candidates), tokenizer, spelling, script), most))


def _encoded(tokenizer: Tokenizer, words: list[str]) -> Iterator[tuple[str, Encoding]]:
    for first in range(0, len(words), _WORDS_AT_ONCE):
        some = words[first : first + _WORDS_AT_ONCE]
        yield from zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True)


def _units(
    encoding: Encoding, space: str | None, to_bytes: Callable[[str], bytes]
) -> Iterator[tuple[Unit, ...]]:
    """Yield the units of every part of a word that the tokenizer merges by itself.

    `space`, if any, precedes the first letters, whatever the tokenizer puts before a text.
    """
    tokens = zip(encoding.word_ids, encoding.tokens, strict=True)
    for _, part in groupby(tokens, key=itemgetter(0)):
        units: list[Unit] = []
        unit: Unit = ()
        for _, token in part:
            unit += (token,)
            try:
                letters = b"".join(map(to_bytes, unit)).decode()
            except UnicodeDecodeError:
                continue
            if letters.strip():
                if space is not None and not letters.startswith(" "):
                    units.append((space,))
                space = None
                units.append(unit)
            unit = ()
        if units:
            yield tuple(units)


def _letters(of_units: Mapping[Unit, int], spelling: Spelling) -> list[Counted]:
    """Return the new tokens that turn each unit of several tokens into one, with their counts."""
    if not spelling.byte_level:  # a character becomes a token without merges
        return [
            (count, NewToken(spelling.joined(unit), None))
            for unit, count in of_units.items()
            if len(unit) > 1
        ]
    made = Counter[Unit]()
    for unit, count in of_units.items():
        for length in range(2, len(unit) + 1):
            made[unit[:length]] += count
    return [
        (count, NewToken("".join(part), ("".join(part[:-1]), part[-1])))
        for part, count in sorted(made.items(), key=lambda item: len(item[0]))
    ]


def _merges_of_units(
    lines: Mapping[tuple[Unit, ...], int],
    frequent: list[Unit],  # any other splits a line
    spelling: Spelling,
    *,
    most: int,
    min_count: int,
) -> list[Counted]:
    """Return the new tokens that merges of units make, in their order, with their counts."""
    character = {unit: chr(_FIRST_UNIT + index) for index, unit in enumerate(frequent)}
    counts = Counter[str]()
    for units, count in lines.items():
        for word in "".join(character.get(unit, " ") for unit in units).split():
            counts[word] += count
    bpe = _trained(counts, len(character) + most, min_count)

    made = Counter[str]()
    for word, encoding in _encoded(bpe, sorted(counts)):
        for token in encoding.tokens:
            made[token] += counts[word]
    merges = json.loads(bpe.to_str())["model"]["merges"]
    first_merge = {left + right: (left, right) for left, right in reversed(merges)}
    for product, parts in first_merge.items():  # the last product first
        for part in parts:
            made[part] += made[product]

    spelt = {char: spelling.joined(unit) for unit, char in character.items()}
    candidates = []
    for product, parts in reversed(first_merge.items()):
        left, right = ("".join(spelt[char] for char in part) for part in parts)
        candidates.append((made[product], NewToken(left + right, (left, right))))
    return candidates


def _trained(counts: Mapping[str, int], vocab_size: int, min_count: int) -> Tokenizer:
    """Return byte-pair encoding trained on counted words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=max(min_count, 1),
        show_progress=False,
        special_tokens=[],
    )
    texts = (
        " ".join([word] * min(counts[word] - done, _WORDS_AT_ONCE))
        for word in sorted(counts)
        if len(word) > 1
        for done in range(0, counts[word], _WORDS_AT_ONCE)
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _allowed(
    candidates: Iterable[NewToken], tokenizer: Tokenizer, spelling: Spelling, script: Script
) -> Iterator[NewToken]:
    """Yield the new candidates that no text without the script can contain, and whose parts were
    not refused.
    """
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    refused = set[str]()
    for new in candidates:
        is_safe = script.alone_begins(spelling.to_bytes(new.token))
        if not is_safe or refused.intersection(new.merged or ()):
            refused.add(new.token)
        elif new.token not in known:
            known.add(new.token)
            yield new
