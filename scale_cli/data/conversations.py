"""Conversations as text and as ids: what people wrote is text, and the chat template's marks alone
are marks.

A template pastes messages between marks such as `<|im_end|>`. If a message contains such a string,
it would end the turn. So `write_conversation` puts GUARD into every mark that it finds in a message,
and the `Encoder` takes the guards out where the tokenizer no longer looks for marks. Marks are the
special tokens, and what the template writes around turns (`unspecial_marks`).
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import TYPE_CHECKING, Any

from scale_cli.chat_turns import ChatTurns, unspecial_marks
from scale_cli.data.encoding import (
    GUARD,
    break_pattern,
    encoder_of,
    learned_tokens,
    once_a_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

# Templates that write today's date write this one into text that trains or is measured, so that it is the
# same tomorrow. It is the day that Llama 3.2's template has where it knows none.
DAY = date(2024, 7, 26)
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def write_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    asks: bool = False,
    template: str | None = None,
) -> str:
    """Return a conversation as the chat template writes it, with GUARD in marks that messages
    contain.

    Args:
        tokenizer: has the template.
        messages: turns, each with `role` and `content`.
        asks: whether the beginning of the assistant's next turn follows.
        template: in place of the tokenizer's own.

    Raises:
        Exception: a template is a program, which may fail in any way.
    """
    guarded = _guard(messages, _marks(tokenizer))
    return str(
        tokenizer.apply_chat_template(
            guarded, chat_template=template, tokenize=False, add_generation_prompt=asks
        )
    )


def writes_today(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the date of the day on which it is asked."""
    return "strftime_now(" in str(tokenizer.chat_template)


@once_a_tokenizer
def template_of_a_day(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template with DAY in place of today."""
    template = str(tokenizer.get_chat_template())
    return _TODAY.sub(lambda found: json.dumps(DAY.strftime(found[2])), template)


@once_a_tokenizer
def _marks(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    return re.compile(break_pattern(special | unspecial_marks(tokenizer)))


_turns = once_a_tokenizer(ChatTurns.of)


def _guard(value: Any, marks: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return marks.sub(lambda found: found[0] + GUARD, value)
    if isinstance(value, list):
        return [_guard(part, marks) for part in value]
    if isinstance(value, dict):
        return {key: _guard(part, marks) for key, part in value.items()}
    return value


def conversation_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the ids of a conversation, as in training; the assistant is to speak next.

    Every verb that answers conversations takes its ids from here. It raises what the template
    raises.
    """
    text = write_conversation(tokenizer, messages, asks=True)
    return encoder_of(tokenizer, conversations=True).encodings([text])[0].ids


def said_tokens(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[bool]:
    """Return for each of `conversation_ids` whether the user or the assistant said it.

    The other tokens are the template's and a system message's, which do not tell the language of an
    answer. If no message is found in the conversation as the template writes it, all tokens count.
    A system message that the template writes into a user's turn counts too, as in vLLM.
    """
    text = write_conversation(tokenizer, messages, asks=True)
    turns = _turns(tokenizer) if _takes_turns(messages) else None
    spans = turns.spans(text) if turns is not None else _found(messages, text, _marks(tokenizer))
    encoding = encoder_of(tokenizer, conversations=True).encodings([text])[0]
    if not spans:
        return [True] * len(encoding.ids)
    return learned_tokens(text, tuple(spans), encoding.offsets, len(encoding.ids)).tolist()


def _takes_turns(messages: Messages) -> bool:
    """Return whether user and assistant speak in turns, the user first and last, after a system message at most."""
    roles = [message["role"] for message in messages]
    talk = roles[roles[:1] == ["system"] :]
    return talk == [("user", "assistant")[place % 2] for place in range(len(talk))] and (
        len(talk) % 2 == 1
    )


def _found(messages: Messages, text: str, marks: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return where a conversation has the messages, whatever turns it has."""
    spans = list[tuple[int, int]]()
    end = 0
    for message in messages:
        content = message["content"]
        if not isinstance(content, str) or message["role"] == "system" or not content.strip():
            continue
        said = _guard(content, marks).strip()
        if (start := text.find(said, end)) >= 0:
            end = start + len(said)
            spans.append((start, end))
    return spans
