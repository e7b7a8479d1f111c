"""Read documents one at a time from files (plain or compressed) or a hub dataset; bad records come
with their place.

The base's chat template turns a conversation into text, in transformers' sandbox. Only the
assistant's turns are learned: the text that the template adds for a turn, after its generation
prompt. This mask needs only that the text of a conversation's first turns is a prefix of the whole
text. A conversation for which this does not hold is dropped.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from scale_cli.config.sources import TextSource
from scale_cli.data.conversations import Messages, template_of_a_day, write_conversation
from scale_cli.data.encoding import GUARD, Document, Spans
from scale_cli.data.files import (
    SourceFile,
    dataset_errors,
    decompressed,
    refusing_mixed_types,
    source_files,
)
from scale_cli.data.formats import Found, PlainLines, pick
from scale_cli.data.ledger import Ledger, Reason, Record, Rejected
from scale_cli.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONS = 100
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, OSError, pa.ArrowException)


class CorpusReader:
    """Iterate once over a source's records in order, good and bad, and enter each into the ledger.

    The chat template of `tokenizer` writes conversations, if the source has any. `files`, if given,
    are the source's files to read.
    """

    def __init__(
        self,
        source: TextSource,
        max_document_bytes: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        files: Sequence[SourceFile] | None = None,
    ) -> None:
        self.source = source
        self.files = source_files(source) if files is None else files
        self.total_bytes = sum(file.size for file in self.files)
        self.ledger = Ledger(files=len(self.files))
        self._limit = max_document_bytes
        self._tokenizer = tokenizer if source.messages_field is not None else None
        self._finished_bytes = 0
        self._raw: IO[bytes] | None = None

    @property
    def position_bytes(self) -> int:
        """Bytes read so far, of `total_bytes`."""
        return self._finished_bytes + (self._raw.tell() if self._raw is not None else 0)

    def __iter__(self) -> Iterator[Record]:
        records = self._from_files() if self.source.dataset is None else self._from_dataset()
        # Conversations count before the template may refuse them: what one source skips, another
        # reads.
        most = self.source.max_documents
        kept = dropped = 0
        skipped: list[Rejected] = []  # which are entered where a source has no document at all
        for record in records:
            if self.ledger.num_skipped < self.source.skip_documents:
                self.ledger.num_skipped += isinstance(record, Document)
                if not (isinstance(record, Rejected) and record.reason is Reason.DAMAGED_FILE):
                    if isinstance(record, Rejected) and len(skipped) < _REASONS:
                        skipped.append(record)
                    continue  # but the documents that a damaged file has lost cannot be counted
            kept += isinstance(record, Document)
            dropped += isinstance(record, Rejected)
            if self._tokenizer is not None and isinstance(record, Document):
                record = _conversation(record, self._tokenizer, self._limit)
            self.ledger.enter(record)
            yield record
            # So many bad records are no corpus, and a hub dataset may be endless.
            if most is not None and (kept == most or dropped > most):
                return
        if not self.ledger.num_skipped:
            for bad in skipped:
                self.ledger.enter(bad)
                yield bad

    def _from_files(self) -> Iterator[Record]:
        for file in self.files:
            try:
                with file.open() as raw:
                    self._raw = raw
                    stream = decompressed(file, raw)
                    if file.format.has_lines:
                        # What ends a line of JSON is no text.
                        counts = self.ledger if file.format.is_text else None
                        stream = io.BufferedReader(PlainLines(stream, counts))
                    items = file.format.read(stream, self.source, self._limit)
                    for where, found, num_bytes in items:
                        yield judge(found, f"{file}{where}", num_bytes, self._limit)
            except _DAMAGED as error:
                self._raw = (
                    None  # it is closed, and whoever takes the record may ask for the position
                )
                told = one_line(error)
                if file.compression == ".zst" and "too much memory" in told:
                    told += (
                        "; it was compressed with a long window: `zstd -d --long=31`, then `zstd` "
                        "again"
                    )
                yield Rejected(Reason.DAMAGED_FILE, f"{file} ({told})", 0)
            finally:
                self._raw = None
            self._finished_bytes += file.size

    def _from_dataset(self) -> Iterator[Record]:
        import datasets  # slow to import

        source = self.source
        with dataset_errors(source):
            rows = datasets.load_dataset(
                source.dataset,
                source.subset,
                split=source.split,
                revision=source.revision,
                streaming=True,
                **refusing_mixed_types(source),
            )
            for number, row in enumerate(rows, start=1):
                yield judge(pick(row, source), f"{source.dataset} row {number}", 0, self._limit)


def judge(
    found: Found, place: str, num_bytes: int, limit: int, learned: Spans | None = None
) -> Record:
    """Return a document, or the reason to reject it; for a record without text, `num_bytes` is its
    size in the file.
    """
    if isinstance(found, tuple):
        return Rejected(Reason.NO_FIELD, place, num_bytes, found)
    if isinstance(found, Reason):
        return Rejected(found, place, num_bytes)
    try:
        num_bytes = len(found.replace(GUARD, "").encode())
    except UnicodeEncodeError:  # JSON can hold "\ud800", half a surrogate pair; UTF-8 cannot
        return Rejected(Reason.NOT_UTF8, place, len(found.encode(errors="replace")))
    if num_bytes > limit:
        return Rejected(Reason.TOO_LARGE, place, num_bytes)
    if "\0" in found:
        return Rejected(Reason.NUL, place, num_bytes)
    if not found.strip():
        return Rejected(Reason.EMPTY, place, num_bytes)
    return Document(found, num_bytes, place, learned)


def _conversation(document: Document, tokenizer: PreTrainedTokenizerBase, limit: int) -> Record:
    """Apply the chat template to a document of JSON messages, and mark the assistant's turns as
    learned.
    """
    messages: Messages = json.loads(document.text)
    learned = []
    try:
        write = partial(write_conversation, tokenizer, template=template_of_a_day(tokenizer))
        whole = write(messages)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = write(messages[: number + 1])
            before = write(messages[:number], asks=True) if number else _opening(after, write)
            if not (after.startswith(before) and whole.startswith(after)):
                return Rejected(Reason.REWRITTEN, document.place, document.num_bytes)
            learned.append((len(before), len(after)))
    except Exception:  # a template is a program: it may fail in any way
        return Rejected(Reason.NOT_RENDERED, document.place, document.num_bytes)
    return judge(whole, document.place, document.num_bytes, limit, tuple(learned))


def _opening(conversation: str, write: Callable[..., str]) -> str:
    """Return what stands before the assistant's words where it speaks first; templates refuse to write that alone."""
    asked = [{"role": "user", "content": "?"}]
    to_answer = write(asked, asks=True).removeprefix(write(asked))
    if not to_answer:
        raise ValueError("the template does not ask for an answer")
    return conversation[: conversation.index(to_answer) + len(to_answer)]
