"""What the user and the assistant said in a prompt, of which only the ids are known.

Where the messages are known, `data/conversations.py` says it. Here it is what stands between the
marks that the tokenizer's chat template writes around a turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
        if not tokenizer.chat_template:
            return None
        said = {"<0>": "user", "<1>": "assistant", "<2>": "user"}
        messages = [{"role": role, "content": content} for content, role in said.items()]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template is a program, which may fail in any way
            return None
        marks = []
        for content in said:
            mark, found, text = text.partition(content)
            if not found:
                return None
            marks.append(mark)
        begin, to_answer, to_question = marks
        # A system message may stand first, so the opening is what later questions begin with too.
        opening = to_question
        while not begin.endswith(opening):
            opening = opening[1:]
        if not opening.strip() or not to_answer.strip() or not to_question.strip():
            return None
        return cls(opening, to_answer, to_question, end=text)

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

    All tokens count in a prompt without turns, or one whose text the tokenizer gives other ids.
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
