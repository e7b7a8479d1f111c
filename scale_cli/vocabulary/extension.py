"""A tokenizer with more tokens: its files with them, and the old pieces of every new token.

tokenizer.json is rewritten. SentencePiece's own file (tokenizer.model), which is all that llama.cpp's converter reads,
is a protobuf message, and what is put after such a message adds to its lists: the old pieces stay byte for byte.
SentencePiece merges the neighbours whose product has the highest score, tokenizers those of the lowest rank.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from tokenizers import Tokenizer

from scale_cli.errors import BaseModelError
from scale_cli.vocabulary.learning import NewToken
from scale_cli.vocabulary.spelling import Spelling

# Of ids that the base has a row for and its tokenizer no token; no text has this, and no bytes are spelt with it.
_UNUSED = "\ue000unused {}\ue000"

SENTENCEPIECE = "tokenizer.model"  # the file's name
_BELOW_ALL = -1e6  # a score that no BPE of SentencePiece has: its own are -rank
_NORMAL_KIND, _CONTROL_KIND, _UNUSED_KIND = 1, 3, 5
_MORE = 0x80  # of a byte of a number: another follows


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
    of_old = {token: [index] for token, index in vocabulary.items() if index < first_id}
    return [_pieces(token, merged, of_old, spelling) for token, index in vocabulary.items() if index >= first_id]


def _described(tokenizer: Tokenizer) -> tuple[dict[str, int], dict[str, tuple[str, str]]]:
    """Return a tokenizer's vocabulary by ids, and of every product the merge that comes first."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    return vocabulary, {left + right: (left, right) for left, right in reversed(model["merges"])}


def _pieces(
    token: str, merged: dict[str, tuple[str, str]], known: dict[str, list[int]], spelling: Spelling
) -> list[int]:
    if token not in known:
        if token in merged:
            left, right = (_pieces(part, merged, known, spelling) for part in merged[token])
            known[token] = left + right
        else:
            known[token] = [known[f"<0x{byte:02X}>"][0] for byte in spelling.to_bytes(token)]
    return known[token]


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
