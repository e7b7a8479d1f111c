"""Ids become text in pieces: a continuation is decoded after the tokens that stand before it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scale_cli.data.encoding import BYTE_TOKEN

# GPT-2's spelling of bytes, in byte-level tokens.
BYTE_OF: dict[str, bytes] = {spelt: bytes([byte]) for byte, spelt in bytes_to_unicode().items()}
_NO_CHARACTER = "\ufffd"  # stands for a byte that is part of no character
# Python's decoder gives each such byte a code point of its own, and holds back what may still
# become a character.
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_WRONG_BYTES = dict.fromkeys(range(0xDC80, 0xDD00), _NO_CHARACTER)


class Decoder:
    """Decodes tokens one at a time into the text that each adds: whole characters, and no special
    tokens.

    Some tokens are bytes, and a character may take several. Its beginning is held back until it is
    whole. A byte of no character becomes U+FFFD, as in SentencePiece. (A tokenizer with byte
    fallback gives up a whole run of bytes for one that is wrong, so runs are not left to it.) Other
    tokens lose a space if they stand first, so each is decoded after one before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> None:
        """Begin after the ids of a prompt, which end with a whole character."""
        self._tokenizer = tokenizer
        self._characters = _Utf8Decoder("surrogateescape")
        self._before = list[int]()
        # The fewest last ids that are text from the beginning of a character on.
        for length in range(1, len(before) + 1):
            self._before = list(before[-length:])
            text = self._text(self._before)
            if text and not text.startswith(_NO_CHARACTER):
                break

    def add(self, token: int) -> str:
        """Return the text that becomes certain; the beginning of a character at the very end never
        does.
        """
        return self._characters.decode(self._bytes(token)).translate(_WRONG_BYTES)

    def _bytes(self, token: int) -> bytes:
        spelt = str(self._tokenizer.convert_ids_to_tokens(token))
        alone = self._text([token])
        byte = BYTE_TOKEN.fullmatch(spelt)
        if byte and alone != spelt:
            added = bytes([int(byte[1], 16)])
        elif _NO_CHARACTER in alone and BYTE_OF.keys() >= set(spelt):
            return b"".join(BYTE_OF[character] for character in spelt)
        else:
            text = self._text([*self._before, token])
            added = text[len(self._text(self._before)) :].encode()
        if added:
            self._before = [token]
        return added

    def _text(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def text_pieces(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], new: Sequence[int]
) -> list[str]:
    """Return the text that each new id adds after the ids `before` it."""
    decoder = Decoder(tokenizer, before)
    return [decoder.add(token) for token in new]


def before_cut_character(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Return ids without the beginning of a character at their end."""
    for length in range(len(ids), max(len(ids) - 4, 0), -1):
        if not str(tokenizer.decode(list(ids[:length]))).endswith(_NO_CHARACTER):
            return list(ids[:length])
    return list(ids)
