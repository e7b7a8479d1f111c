"""SentencePiece's own file of a tokenizer (tokenizer.model) with more pieces: llama.cpp's converter reads that alone.

It is a protobuf message, and what is put after such a message adds to its lists: the old pieces stay byte for byte.
SentencePiece merges the neighbours whose product has the highest score, tokenizers those of the lowest rank.
"""

from __future__ import annotations

import struct

from tokenizers import Tokenizer

from scale_cli.errors import BaseModelError

SENTENCEPIECE = "tokenizer.model"  # the file's name
_BELOW_ALL = -1e6  # a score that no BPE of SentencePiece has: its own are -rank
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_MORE = 0x80  # of a byte of a number: another follows


def with_new_pieces(model: bytes, tokenizer: Tokenizer, first_id: int) -> bytes:
    """Return a SentencePiece model that has all of a tokenizer's ids.

    Args:
        model: the base's.
        tokenizer: with new tokens.
        first_id: of the new tokens.

    Raises:
        BaseModelError: it is no such model.
    """
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    for index in range(_num_pieces(model), len(tokens)):
        kind = _NORMAL if index >= first_id else _CONTROL if index in added else _UNUSED
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
