"""A user's text in parts: to train on, to measure on, and as turns of a chat."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

from scale_cli.errors import CorpusError
from scale_cli.starter.texts import FEW_DOCUMENTS, Text
from scale_cli.values import counted

# Held out are so many documents with so much text, but no more text than a small base reads in minutes on a CPU.
_DOCUMENTS = 32
_LEAST_BYTES = 1 << 14
_MOST_BYTES = 1 << 15
_FEWEST = 4  # with fewer, intervals mean nothing
_FEW = 8  # with fewer, a warning says so
_PIECE = 2_000  # characters of a document that is cut
_LARGEST_PIECE = 500_000
_TURNS = 8  # of chat that is measured
_TURN_CHARACTERS = 400
_LEAST_TURNS = 40  # characters of both: a headline or a scene break is no turn


@dataclass(frozen=True)
class Parted:
    """A text in two parts: one to train on, one held out."""

    trained_on: dict[str, Any]  # entries of a config; empty: the text is too short to train on
    held_out: dict[str, Any]
    words: str  # how it was split
    held_out_documents: Sequence[str]
    files: dict[Path, str] = field(default_factory=dict)  # to write

    def warnings(self) -> Iterator[str]:
        """Yield that too little is held out to tell much."""
        number = len(self.held_out_documents)
        if number < _FEW:
            yield (
                f"{self.held_out['name']}: only {counted(number, 'document')} held out, too few to tell a small "
                "change from chance; for more, raise max_documents there, and skip_documents of the text that trains"
            )


def part(text: Text, held_name: str, file: Path, num_tokens: int, *, most: float) -> Parted:
    """Hold out the first documents of a text.

    Of fewer than ten documents, the end of each is held out, if a run needs no more than was read.

    Args:
        text: what was read of it.
        held_name: name of the part that is held out.
        file: the config, beside which new files lie.
        num_tokens: of the run. Of a large text, what the run does not read is left out.
        most: share of the documents that may be held out.
    """
    number = len(text.documents)
    # Twice what a run reads.
    wanted = ceil(2 * num_tokens / text.tokens_per_byte / text.bytes_read * number)
    if number < FEW_DOCUMENTS and (text.is_whole or wanted <= number):
        return _cut(text, held_name, file)
    held = min(max(1, int(most * number)), _enough(text))
    source = {**text.source, "skip_documents": held}
    each = ""
    if text.is_txt:
        each = " (a line each)" if "documents" in text.source else " (text between blank lines)"
    words = f"{number:,} documents{each}: the first {held:,} held out, the rest to train on"
    if not text.is_whole:
        source["max_documents"] = read = max(number, wanted)  # at least what was read here
        words = (
            f"the first {counted(held, 'document')}{each} held out, the next {read:,} to train on: "
            "enough for these steps, the rest is not read"
        )
    return Parted(
        trained_on=source,
        held_out=_first(text, held_name, held),
        words=words,
        held_out_documents=text.documents[:held],
    )


def _enough(text: Text) -> int:
    """Return how many documents are enough to measure on: by the text alone, whatever the device."""
    num_bytes = list(accumulate(len(document.encode()) for document in text.documents))
    wanted = max(_DOCUMENTS, 1 + bisect_left(num_bytes, _LEAST_BYTES))
    return min(wanted, max(_FEWEST, bisect_right(num_bytes, _MOST_BYTES)))


def measured_on_alone(text: Text, held_name: str) -> Parted:
    """Hold out the beginning of a text that is too short to train on."""
    held = min(_enough(text), len(text.documents))
    return Parted(
        trained_on={},
        held_out=_first(text, held_name, held),
        words=f"too little to train on: {counted(held, 'document')} held out",
        held_out_documents=text.documents[:held],
    )


def _first(text: Text, name: str, number: int) -> dict[str, Any]:
    split = {"split": "train"} if "dataset" in text.source else {}
    return {**split, **text.source, "name": name, "max_documents": number}


def _cut(text: Text, held_name: str, file: Path) -> Parted:
    """Hold out the last tenth of every document, in files of their own."""
    name = text.source["name"]
    number = len(text.documents)
    parts: dict[str, list[str]] = {name: [], held_name: []}
    for document in text.documents:
        pieces = _split(document, min(_PIECE, max(1, len(document) // FEW_DOCUMENTS)))
        at = len(pieces) - max(1, len(pieces) // FEW_DOCUMENTS)
        parts[name] += _split("".join(pieces[:at]), _LARGEST_PIECE)
        parts[held_name] += pieces[at:]
    sources = []
    files = {}
    for part_name, pieces in parts.items():
        path = file.with_name(f"{file.stem}.{part_name}.jsonl")
        parts[part_name] = [piece.strip() for piece in pieces if piece.strip()]
        files[path] = as_lines([{"text": piece} for piece in parts[part_name]])
        sources.append({"name": part_name, "path": str(path), "language": text.source["language"]})
    if not all(parts.values()):
        raise CorpusError(
            f"{text.flag}: too little text to hold out a part ({counted(number, 'document')}, "
            f"{text.num_bytes:,} bytes); give more text"
        )
    cut = "1 document: its last tenth"
    if number > 1:
        cut = f"{number} documents: the last tenth of each"
    words = f"{cut} held out; written as {' and '.join(path.name for path in files)}"
    trained_on, held_out = sources
    return Parted(trained_on, held_out, words, parts[held_name], files)


def _split(text: str, length: int) -> list[str]:
    """Cut a text into pieces of at most `length` characters, after white space if there is any."""
    return re.findall(rf".{{1,{length}}}(?:(?<=\s)|\Z)|.{{1,{length}}}", text, re.DOTALL)


def as_lines(records: Sequence[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def chat_of(parted: Parted, role: str, file: Path) -> Parted:
    """Return turns to measure: the user gives the beginning of a held-out document, and the
    assistant the rest.
    """
    turns = []
    long = [text for text in parted.held_out_documents if len(text.strip()) >= _LEAST_TURNS]
    for document in (long or parted.held_out_documents)[:_TURNS]:
        text = document.strip()[: 2 * _TURN_CHARACTERS]
        half = len(text) // 2
        asked = {"role": "user", "content": text[:half]}
        turns.append([asked, {"role": "assistant", "content": text[half:]}])
    path = file.with_name(f"{file.stem}.chat-{role}.jsonl")
    source = {
        "name": f"chat-{role}",
        "path": str(path),
        "messages_field": "messages",
        "language": parted.held_out["language"],
    }
    return Parted(
        trained_on={},
        held_out=source,
        words="",
        held_out_documents=[json.dumps(messages, ensure_ascii=False) for messages in turns],
        files={path: as_lines([{"messages": messages} for messages in turns])},
    )
