"""Ids become text in pieces: a continuation is decoded after the tokens that stand before it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_NO_CHARACTER = "\ufffd"  # stands for bytes that are no character


class Decoder:
    """Decodes tokens one at a time into the text that each adds: whole characters, and no special
    tokens.

    A token alone may lose its space, and a byte token its character: a run of byte tokens is
    decoded as a whole. So each is decoded with the tokens before it, back to a place where a
    character begins. An incomplete character is held back until it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> None:
        """Begin after the ids of a prompt, which end with a whole character."""
        self._tokenizer = tokenizer
        self._held = list[int]()
        self._given = list[int]()
        # The fewest last ids that are text from the beginning of a character on.
        for length in range(1, len(before) + 1):
            self._given = list(before[-length:])
            text = self._text(self._given)
            if text and _NO_CHARACTER not in text:
                break

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._added_by_held()
        if not text or text.endswith(_NO_CHARACTER):
            return ""
        self._given = self._held
        self._held = []
        return text.replace(_NO_CHARACTER, "")

    def finish(self) -> str:
        return self._added_by_held().replace(_NO_CHARACTER, "")

    def _added_by_held(self) -> str:
        return self._text([*self._given, *self._held])[len(self._text(self._given)) :]

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
    pieces = [decoder.add(token) for token in new]
    if pieces:
        pieces[-1] += decoder.finish()
    return pieces


def before_cut_character(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Return ids without the beginning of a character at their end."""
    for length in range(len(ids), max(len(ids) - 4, 0), -1):
        if not str(tokenizer.decode(list(ids[:length]))).endswith(_NO_CHARACTER):
            return list(ids[:length])
    return list(ids)
