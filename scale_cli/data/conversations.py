"""Conversations as text: written by the base's chat template, in transformers' sandbox, and what of it is learned.

Learned are the assistant's turns: all that the template adds with one, behind what it writes to ask for it. So the mask
needs nothing of the template but that a conversation's text begins with the text of its beginning, which is held to for
every conversation; one of which it does not hold is dropped, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli.data.documents import Document, Reason, Record, Rejected, judged
from scale_cli.data.encoding import Conversation

Messages = list[dict[str, Any]]


class _Rewritten(Exception):
    """A template that writes a turn otherwise when more follow."""


def conversations(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, limit: int) -> Iterator[Record]:
    """Yield records whose documents are messages as JSON, with the text that a tokenizer's template makes of them."""
    for record in records:
        yield _written(record, tokenizer, limit) if isinstance(record, Document) else record


def _written(document: Document, tokenizer: PreTrainedTokenizerBase, limit: int) -> Record:
    try:
        conversation = written(json.loads(document.text), tokenizer)
    except _Rewritten:
        return Rejected(Reason.REWRITTEN, document.place, document.num_bytes)
    except Exception:  # a template is a program: it may fail in any way, and refuses by an exception of its own
        return Rejected(Reason.NOT_RENDERED, document.place, document.num_bytes)
    return judged(conversation.text, document.place, limit, conversation.learned)


def written(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Return a conversation's text, and from where to where in it the assistant speaks."""

    def text_of(messages: Messages, *, asks: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))

    whole, learned = text_of(messages), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = text_of(messages[:number], asks=True), text_of(messages[: number + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise _Rewritten
        learned.append((len(before), len(after)))
    return Conversation(whole, tuple(learned))
