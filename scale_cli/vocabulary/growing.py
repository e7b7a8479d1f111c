"""Tokenizers that can grow: how their tokens spell bytes, and adding new tokens to them.

Two kinds of BPE can grow:

- byte-level (Llama 3, Qwen): every byte has a character, and all other tokens are merges
- with byte fallback (Llama 2, Mistral): before any merge, a character that is no token becomes its
  bytes (`<0xEC>`)

tokenizer.json is rewritten. SentencePiece's own file (tokenizer.model) is left out: it would have
only the old tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
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
# Settings of BPE with which a token is more than its bytes, or a text has no fixed tokens.
_NOT_PLAIN = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


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
        steps = json.dumps([described.get("pre_tokenizer"), described.get("normalizer")])
        byte_level = '"type": "ByteLevel"' in steps
        is_plain = model["type"] == "BPE" and not any(model.get(key) for key in _NOT_PLAIN)
        if not is_plain or not (byte_level or model.get("byte_fallback")):
            raise BaseModelError(
                f"method.vocabulary: the tokenizer of {name} ({model['type']}) is neither byte-level BPE nor BPE with "
                "byte fallback, so no token can be added to it"
            )
        spelt = bytes_to_unicode() if byte_level else {b: f"<0x{b:02X}>" for b in range(256)}
        missing = [byte for byte, token in spelt.items() if token not in model["vocab"]]
        return cls(byte_level, frozenset(missing))

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
