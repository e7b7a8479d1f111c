"""What a tokenizer's chat template writes around what is said: the marks of turns.

It needs Python alone, since vLLM loads it too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TURNS = ("user", "assistant", "user")
_CONVERSATIONS = (_TURNS, ("system", *_TURNS), ("user", "assistant", "tool", "assistant"))
_SIGN = re.compile(r"[^\w\s]")  # is in marks, and not in added words and spaces


def unspecial_marks(tokenizer: Any) -> set[str]:
    """Return the added tokens that a chat template writes around turns, and that the tokenizer does
    not call special.
    """
    around = [text for roles in _CONVERSATIONS for text in (_around(tokenizer, roles) or [])[:-1]]
    added = tokenizer.added_tokens_decoder.values()
    plain = {token.content for token in added if not token.special and _SIGN.search(token.content)}
    return {mark for mark in plain if any(mark in text for text in around)}


def answer_end(tokenizer: Any) -> int | None:
    """Return the id of the mark that a chat template writes right after the assistant's words; None
    if there is none.
    """
    _, _, after, _ = _around(tokenizer, _TURNS) or [""] * 4
    found = {
        token: index
        for token, index in tokenizer.get_added_vocab().items()
        if _SIGN.search(token) and after.lstrip().startswith(token)
    }
    return found[max(found, key=len)] if found else None


def _around(tokenizer: Any, roles: Sequence[str]) -> list[str] | None:
    """Return what a chat template writes before, between and after messages of these roles, where
    the assistant is to speak; None if it refuses or changes them.
    """
    if not tokenizer.chat_template:
        return None
    said = [f"<{number}>" for number in range(len(roles))]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, said, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program, which may fail in any way
        return None
    around = []
    for content in said:
        mark, found, text = text.partition(content)
        if not found:
            return None
        around.append(mark)
    return [*around, text]


@dataclass(frozen=True)
class ChatTurns:
    """What a chat template writes between the user's and the assistant's words."""

    opening: str  # before the user's first words
    to_answer: str
    to_question: str
    end: str  # after the user's last words, where the assistant is to speak

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTurns | None:
        """Return the marks of a tokenizer's chat template; None if it has none, or none that can be
        found in a text.
        """
        around = _around(tokenizer, _TURNS)
        if around is None:
            return None
        begin, to_answer, to_question, end = around
        # A system message may stand first, so the opening is what later questions begin with too.
        opening = to_question
        while not begin.endswith(opening):
            opening = opening[1:]
        if not opening.strip() or not to_answer.strip() or not to_question.strip():
            return None
        return cls(opening, to_answer, to_question, end)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the places of the user's and the assistant's words, in turns, without the spaces
        around them; none of a text that has no turns.
        """
        start = text.find(self.opening)
        if start < 0:
            return []
        start += len(self.opening)
        stop = max(start, len(text.removesuffix(self.end)))
        spans = []
        for mark in itertools.cycle((self.to_answer, self.to_question)):
            found = text.find(mark, start, stop)
            end = stop if found < 0 else found
            words = text[start:end]
            spans.append((end - len(words.lstrip()), start + len(words.rstrip())))
            if found < 0:
                break
            start = end + len(mark)
        return spans


def read_prompt(
    tokenizer: Any, turns: ChatTurns | None, ids: Sequence[int]
) -> tuple[str, list[bool]]:
    """Return the user's words in a prompt, and whether somebody said each of its tokens.

    Only the ids are known; of messages, `data/conversations.py` says it. All tokens count in a
    prompt without turns, or one whose text the tokenizer gives other ids.
    """
    text = tokenizer.decode(ids)
    spans = [] if turns is None else turns.spans(text)
    if not spans:
        return tokenizer.decode(ids, skip_special_tokens=True), [True] * len(ids)
    words = "\n".join(text[start:end] for start, end in spans[::2])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded.input_ids != list(ids):
        return words, [True] * len(ids)
    said = [
        any(start < last and first < end for start, end in spans)
        for first, last in encoded.offset_mapping
    ]
    return words, said
