"""How a tokenizer spells bytes, and the two kinds of BPE whose vocabulary can grow.

- byte-level (Llama 3, Qwen): a character stands for every byte, and all else is merges
- with byte fallback (Llama 2, Mistral): a character is a token of the vocabulary or falls back to its bytes (`<0xEC>`)
  before any merge
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.errors import BaseModelError

_SPACE = "▁"  # for a space, beside byte fallback
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}  # as GPT-2 spells bytes


@dataclass(frozen=True)
class Spelling:
    """What a tokenizer's tokens are in bytes."""

    byte_level: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str) -> Spelling:
        """Read it off a tokenizer; `name` is its model's, for the message where its vocabulary cannot grow."""
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        marks = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
        if model["type"] == "BPE" and not marks:
            if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
                return cls(byte_level=False)
            if _has_byte_level(described) and model["vocab"].keys() >= _BYTE_OF.keys():
                return cls(byte_level=True)
        kind = f"{model['type']} with {marks[0]}" if marks else model["type"]
        raise BaseModelError(
            f"method.vocabulary: the tokenizer of {name} ({kind}) is neither byte-level BPE nor BPE with byte "
            "fallback, so no token can be added to it"
        )

    @property
    def space(self) -> str:
        """The token of a space alone."""
        return "Ġ" if self.byte_level else _SPACE

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that a token stands for."""
        if self.byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        of_one = _BYTE.fullmatch(token)
        return bytes([int(of_one[1], 16)]) if of_one else token.replace(_SPACE, " ").encode()

    def joined(self, tokens: Iterable[str]) -> str:
        """Return the token that some consecutive ones make, which begin and end with whole characters."""
        if self.byte_level:
            return "".join(tokens)
        return b"".join(map(self.to_bytes, tokens)).decode().replace(" ", _SPACE)


def _has_byte_level(described: dict[str, Any]) -> bool:
    steps = [described.get("pre_tokenizer"), described.get("normalizer")]
    while steps:
        step = steps.pop()
        if isinstance(step, dict):
            if step.get("type") == "ByteLevel":
                return True
            steps += [part for key in ("pretokenizers", "normalizers") for part in step.get(key) or ()]
    return False
