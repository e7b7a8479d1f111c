"""Learn new tokens for a tokenizer, and add them to its files.

Two kinds of BPE can grow:

- byte-level (Llama 3, Qwen): every byte has a character, and all other tokens are merges
- with byte fallback (Llama 2, Mistral): before any merge, a character that is no token becomes its
  bytes (`<0xEC>`)

tokenizer.json is rewritten. SentencePiece's own file (tokenizer.model) is left out: it would have
only the old tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.config.vocabulary import Script
from scale_cli.data.decoding import BYTE_OF
from scale_cli.data.encoding import BYTE_TOKEN
from scale_cli.errors import BaseModelError

_SPACE = "▁"  # a space in tokenizers with byte fallback
# Token for an id with a row in the base but no token in its tokenizer; no text and no spelling of
# bytes contains it.
_UNUSED = "\ue000unused {}\ue000"

SENTENCEPIECE = "tokenizer.model"  # the file's name
_MOST_OF_A_SCRIPT = 0.1  # share of a base's own tokens

_WORDS_AT_ONCE = 4096  # passed to `tokenizers` in one call
_FIRST_UNIT = 0x10000  # the character for the first unit, above the surrogates

Unit = tuple[str, ...]  # tokens of the tokenizer that together are whole letters


@dataclass(frozen=True)
class NewToken:
    """A token to be added."""

    token: str
    # the two tokens merged into it; None: a character, which needs no merge
    merged: tuple[str, str] | None


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer's tokens spell bytes."""

    byte_level: bool
    missing: frozenset[int] = frozenset()  # bytes that no token spells

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str) -> Spelling:
        """Return a tokenizer's spelling; BaseModelError, naming the model `name`, if its vocabulary
        cannot grow.
        """
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        marks = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model["type"] == "BPE" and not any(model.get(mark) for mark in marks):
            steps = json.dumps([described.get("pre_tokenizer"), described.get("normalizer")])
            byte_level = '"type": "ByteLevel"' in steps
            if byte_level or model.get("byte_fallback"):
                spelt = (
                    bytes_to_unicode() if byte_level else {b: f"<0x{b:02X}>" for b in range(256)}
                )
                missing = [byte for byte, token in spelt.items() if token not in model["vocab"]]
                return cls(byte_level, frozenset(missing))
        raise BaseModelError(
            f"method.vocabulary: the tokenizer of {name} ({model['type']}) is neither byte-level BPE nor BPE with byte "
            "fallback, so no token can be added to it"
        )

    def check(self, script: Script, tokenizer: Tokenizer, name: str) -> None:
        """Raise BaseModelError if a tokenizer, that of the model `name`, cannot spell a script, or
        has many tokens of it already.
        """
        spans = (range(first, last + 1) for first, last in script.ranges)
        needed = {*"".join(chr(code) for span in spans for code in span).encode()}
        if self.byte_level:
            needed.add(ord(" "))
        if lacking := self.missing & needed:
            raise BaseModelError(
                f"method.vocabulary: the tokenizer of {name} has no token for the bytes "
                f"{bytes(sorted(lacking)).hex(' ')}, which letters of method.vocabulary.script need, so it loses them; "
                "choose another base"
            )
        tokens = tokenizer.get_vocab()
        spelt = (token for token in tokens if not token.removeprefix(self.space).isascii())
        of_script = sum(script.alone_begins(self.to_bytes(token)) for token in spelt)
        if of_script > _MOST_OF_A_SCRIPT * len(tokens):
            raise BaseModelError(
                f"method.vocabulary.script: {of_script:,} of the {len(tokens):,} tokens of {name} are of this "
                "script already; remove method.vocabulary"
            )

    @property
    def space(self) -> str:
        return "Ġ" if self.byte_level else _SPACE

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            return b"".join([BYTE_OF.get(c) or c.encode() for c in token])
        of_one = BYTE_TOKEN.fullmatch(token)
        return bytes([int(of_one[1], 16)]) if of_one else token.replace(_SPACE, " ").encode()

    def joined(self, tokens: Iterable[str]) -> str:
        """Join consecutive tokens into one; together they must be whole characters."""
        if self.byte_level:
            return "".join(tokens)
        return b"".join(map(self.to_bytes, tokens)).decode().replace(" ", _SPACE)


# Learning continues byte-pair encoding from a tokenizer's own merges, on the letters of one script
# only.
#
# It merges units: the shortest runs of the tokenizer's tokens that are whole letters. A unit is one
# token if the tokenizer has one for the letter, else the tokens of its bytes, which are merged from
# the left. A merge is kept if its product is a new token and can only begin the script's letters
# (`Script.alone_begins`), after at most one space. So a text without the script never contains a
# new token: old merges come first, and none of them takes a new token.
#
# `tokenizers` learns the merges of units. The count of a product is how often it remains, plus the
# counts of all products made from it. By these counts, letters and merges form one list, the most
# frequent first, as if bytes and units had been learned together; the list is cut when it has
# enough tokens.


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
    lines = Counter[tuple[Unit, ...]]()
    of_units = Counter[Unit]()
    spelt = dict[str, bytes]()
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
    # Stable: of equals, the later may contain the earlier.
    candidates.sort(key=lambda counted: -counted[0])
    return list(islice(_allowed((new for _, new in candidates), tokenizer, spelling, script), most))


def _encoded(tokenizer: Tokenizer, words: list[str]) -> Iterator[tuple[str, Encoding]]:
    for first in range(0, len(words), _WORDS_AT_ONCE):
        some = words[first : first + _WORDS_AT_ONCE]
        yield from zip(some, tokenizer.encode_batch(some, add_special_tokens=False), strict=True)


def _units(
    encoding: Encoding, space: str | None, spelling: Spelling, spelt: dict[str, bytes]
) -> Iterator[tuple[Unit, ...]]:
    """Yield the units of every part of a word that the tokenizer merges by itself.

    `space`, if any, precedes the first letters, whatever the tokenizer puts before a text.
    """
    units: list[Unit] = []
    unit: list[str] = []
    cut = b""
    before = None
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
        unit = []
        cut = b""
    if units:
        yield tuple(units)


def _merges_of_units(
    lines: Mapping[tuple[Unit, ...], int], character: Mapping[Unit, str], most: int, min_count: int
) -> list[tuple[str, str, int]]:
    """Return the merges of units, as characters, in order, with their counts; a rare unit splits a
    line.
    """
    counted = Counter[str]()
    for units, count in lines.items():
        for word in "".join(character.get(unit, " ") for unit in units).split():
            counted[word] += count
    words = sorted(word for word in counted if len(word) > 1)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=len(character) + most,
        min_frequency=max(min_count, 1),
        show_progress=False,
        special_tokens=[],
    )
    texts = (
        " ".join([word] * min(counted[word] - done, _WORDS_AT_ONCE))
        for word in words
        for done in range(0, counted[word], _WORDS_AT_ONCE)
    )
    bpe.train_from_iterator(texts, trainer)
    merges: list[tuple[str, str]] = json.loads(bpe.to_str())["model"]["merges"]

    made = Counter[str]()
    for word, encoding in _encoded(bpe, words):
        for token in encoding.tokens:
            made[token] += counted[word]
    # Each product once.
    last_first = list({left + right: (left, right) for left, right in reversed(merges)}.values())
    for left, right in last_first:
        made[left] += made[left + right]
        made[right] += made[left + right]
    return [(left, right, made[left + right]) for left, right in reversed(last_first)]


def _letters(of_units: Mapping[Unit, int], spelling: Spelling) -> list[tuple[int, NewToken]]:
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


def _allowed(
    candidates: Iterable[NewToken], tokenizer: Tokenizer, spelling: Spelling, script: Script
) -> Iterator[NewToken]:
    """Yield the new candidates that no text without the script can contain, and whose parts were
    not refused.
    """
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    refused = set[str]()
    for new in candidates:
        if not script.alone_begins(spelling.to_bytes(new.token)) or refused.intersection(
            new.merged or ()
        ):
            refused.add(new.token)
        elif new.token not in known:
            known.add(new.token)
            yield new


# Adding them


def extended(tokenizer: Tokenizer, new: Sequence[NewToken], first_id: int) -> Tokenizer:
    """Return the tokenizer with the new tokens from `first_id` on, the number of rows of the base's
    embedding.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    # An added token that is not in the model would get the next free id from tokenizers, and so
    # move.
    for added in described["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
    taken = set(vocabulary.values())
    vocabulary |= {_UNUSED.format(index): index for index in range(first_id) if index not in taken}
    vocabulary |= {token.token: first_id + index for index, token in enumerate(new)}
    described["model"]["merges"] += [list(token.merged) for token in new if token.merged]
    return Tokenizer.from_str(json.dumps(described))


def pieces(tokenizer: Tokenizer, spelling: Spelling, first_id: int) -> list[list[int]]:
    """Return, for every new token in order, the old ids that it replaces."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"].items(), key=lambda item: item[1])
    # Every product's first merge.
    merged = {left + right: (left, right) for left, right in reversed(model["merges"])}
    known = {token: [index] for token, index in vocabulary if index < first_id}

    def old_ids(token: str) -> list[int]:
        if token not in known:
            if token in merged:
                left, right = merged[token]
                known[token] = old_ids(left) + old_ids(right)
            else:
                of_bytes = [f"<0x{byte:02X}>" for byte in spelling.to_bytes(token)]
                if lacking := set(of_bytes) - known.keys():
                    raise BaseModelError(
                        f"method.vocabulary: the new token {token!r} is not made of old ones, which lack "
                        f"{', '.join(sorted(lacking))}"
                    )
                known[token] = [known[byte][0] for byte in of_bytes]
        return known[token]

    return [old_ids(token) for token, index in vocabulary if index >= first_id]
