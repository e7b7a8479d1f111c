"""A tokenizer with more tokens: how it spells bytes, what it can learn, its files with new tokens, the pieces of each.

Two kinds of BPE can grow:

- byte-level (Llama 3, Qwen): a character stands for every byte, and all else is merges
- with byte fallback (Llama 2, Mistral): a character is a token of the vocabulary or falls back to its bytes (`<0xEC>`)
  before any merge

tokenizer.json is rewritten. SentencePiece's own file (tokenizer.model), which is all that llama.cpp's converter reads,
is a protobuf message, and what is put after such a message adds to its lists: the old pieces stay byte for byte.
SentencePiece merges the neighbours whose product has the highest score, tokenizers those of the lowest rank.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.config.vocabulary import Script
from scale_cli.errors import BaseModelError

_SPACE = "▁"  # for a space, beside byte fallback
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}  # as GPT-2 spells bytes
# Of ids that the base has a row for and its tokenizer no token; no text has this, and no bytes are spelt with it.
_UNUSED = "\ue000unused {}\ue000"

SENTENCEPIECE = "tokenizer.model"  # the file's name
_BELOW_ALL = -1e6  # a score that no BPE of SentencePiece has: its own are -rank
_NORMAL_KIND, _CONTROL_KIND, _UNUSED_KIND = 1, 3, 5
_MORE = 0x80  # of a byte of a number: another follows

_WORDS_AT_ONCE = 4096  # handed to `tokenizers` in one call
_FIRST_UNIT = 0x10000  # the character that stands for the first unit; surrogates are below

Unit = tuple[str, ...]  # tokens of the tokenizer that make whole letters


@dataclass(frozen=True)
class NewToken:
    """A token to be added."""

    token: str
    merged: tuple[str, str] | None  # of which two; None: a character, which needs no merge


@dataclass(frozen=True)
class Spelling:
    """What a tokenizer's tokens are in bytes."""

    byte_level: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str) -> Spelling:
        """Read it off a tokenizer; `name` is its model's, for the message where its vocabulary cannot grow."""
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        marks = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model["type"] == "BPE" and not any(model.get(mark) for mark in marks):
            if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
                return cls(byte_level=False)
            steps = json.dumps([described.get("pre_tokenizer"), described.get("normalizer")])
            if '"type": "ByteLevel"' in steps and model["vocab"].keys() >= _BYTE_OF.keys():
                return cls(byte_level=True)
        raise BaseModelError(
            f"method.vocabulary: the tokenizer of {name} ({model['type']}) is neither byte-level BPE nor BPE with byte "
            "fallback, so no token can be added to it"
        )

    @property
    def space(self) -> str:
        return "Ġ" if self.byte_level else _SPACE

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        of_one = _BYTE.fullmatch(token)
        return bytes([int(of_one[1], 16)]) if of_one else token.replace(_SPACE, " ").encode()

    def joined(self, tokens: Iterable[str]) -> str:
        """Return the token that some consecutive ones make, which begin and end with whole characters."""
        if self.byte_level:
            return "".join(tokens)
        return b"".join(map(self.to_bytes, tokens)).decode().replace(" ", _SPACE)


# Byte-pair encoding learned on, from where a tokenizer left off, of one script's letters alone.
#
# What is merged are units: the shortest runs of the tokenizer's own tokens that are whole letters. A unit is one token
# where the tokenizer has one, else the tokens of its bytes, which are merged from the left. A merge is kept where its
# product can only be a beginning of the script's letters (`Script.alone_begins`), after a space at the most, and is no
# token yet. So no text without the script has a new token in it: old merges come first, and none takes a new token.
#
# `tokenizers` learns the merges of units. How often each product was ever made follows from how often it is left: every
# product that was made of it has taken one. With that, letters and merges are one list, the most frequent first, as if
# bytes and units had been learned together; it is cut where enough tokens are in it.


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


# Adding them


def extended(tokenizer: Tokenizer, new: Sequence[NewToken], first_id: int) -> Tokenizer:
    """Return a tokenizer with new tokens after all old ids, each after those that it is made of.

    `first_id` is the first of the new ones: how many rows the base's embedding has.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    # tokenizers gives an added token that the model does not hold the next free id, so that it would move.
    for added in described["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
    taken = set(vocabulary.values())
    vocabulary |= {_UNUSED.format(index): index for index in range(first_id) if index not in taken}
    vocabulary |= {token.token: first_id + index for index, token in enumerate(new)}
    described["model"]["merges"] += [list(token.merged) for token in new if token.merged]
    return Tokenizer.from_str(json.dumps(described))


def new_tokens(tokenizer: Tokenizer, first_id: int) -> list[NewToken]:
    """Return what a tokenizer was extended by, from `first_id` on."""
    vocabulary, merged = _described(tokenizer)
    return [NewToken(token, merged.get(token)) for token in vocabulary if vocabulary[token] >= first_id]


def pieces(tokenizer: Tokenizer, spelling: Spelling, first_id: int) -> list[list[int]]:
    """Return of every new token of a tokenizer the old ids that stood in its place, in order."""
    vocabulary, merged = _described(tokenizer)
    known = {token: [index] for token, index in vocabulary.items() if index < first_id}

    def old_ids(token: str) -> list[int]:
        if token not in known:
            if token in merged:
                left, right = merged[token]
                known[token] = old_ids(left) + old_ids(right)
            else:
                known[token] = [known[f"<0x{byte:02X}>"][0] for byte in spelling.to_bytes(token)]
        return known[token]

    return [old_ids(token) for token, index in vocabulary.items() if index >= first_id]


def _described(tokenizer: Tokenizer) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
    """Return a tokenizer's vocabulary by ids, and of every product the merge that comes first."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    return vocabulary, {left + right: (left, right) for left, right in reversed(model["merges"])}


def with_new_pieces(model: bytes, tokenizer: Tokenizer, first_id: int) -> bytes:
    """Return a base's SentencePiece model with the rest of a tokenizer's ids."""
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    for index in range(_num_pieces(model), len(tokens)):
        kind = _NORMAL_KIND if index >= first_id else _CONTROL_KIND if index in added else _UNUSED_KIND
        text = tokens[index].encode()
        piece = b"\x0a" + _number(len(text)) + text + b"\x15" + struct.pack("<f", _BELOW_ALL - index)
        piece += b"\x18" + _number(kind)
        model += b"\x0a" + _number(len(piece)) + piece
    return model


def _num_pieces(model: bytes) -> int:
    """Return how many pieces it has: its first field. Of all its fields a length stands before each."""
    count = at = 0
    while at < len(model):
        count += model[at] >> 3 == 1
        at, length, shift = at + 1, 0, 0
        while at < len(model):
            length |= (model[at] & ~_MORE) << shift
            at, shift = at + 1, shift + 7
            if not model[at - 1] & _MORE:
                break
        at += length
    if at != len(model):
        raise BaseModelError(f"model.base: its {SENTENCEPIECE} is damaged")
    return count


def _number(value: int) -> bytes:
    written = []
    while value >= _MORE:
        written.append(value & ~_MORE | _MORE)
        value >>= 7
    return bytes([*written, value])
