"""A tokenizer with more tokens: how it spells bytes, its files with new tokens, and the old pieces of each.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
