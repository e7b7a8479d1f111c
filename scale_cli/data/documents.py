"""Read documents one at a time from files (plain or compressed) or a hub dataset; bad records come
with their place.

Memory does not grow with the corpus: lines, paragraphs and rows are read one by one, and one above
the size limit is skipped without being held.

The base's chat template turns a conversation into text, in transformers' sandbox. Only the
assistant's turns are learned: the text that the template adds for a turn, after its generation
prompt. This mask needs only that the text of a conversation's first turns is a prefix of the whole
text. A conversation for which this does not hold is dropped.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet

from scale_cli.config.sources import TextSource
from scale_cli.data.conversations import Messages, write_conversation
from scale_cli.data.encoding import GUARD, Document, Spans
from scale_cli.data.files import OF_LINES, SourceFile, dataset_errors, decompressed, source_files
from scale_cli.data.ledger import Ledger, Reason, Record, Rejected
from scale_cli.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_LINE_END = re.compile(rb"\r\n?")
_CUT_ENDS = (b"\r", b"\xef\xbb", b"\xef")  # of blocks: half a CRLF or mark
_NEWLINE = "\n"
# A line of JSON is longer than its text: an escape takes up to six bytes per byte, and there are
# other fields.
_JSON_BYTES_PER_TEXT_BYTE = 8
_SKIPPED_AT_ONCE = 1 << 20
_MAX_JSON_BYTES = 1 << 28
_ROWS_AT_ONCE = 256
_LONGEST_HEADER = 200
# An object whose first value is a list of objects, as of {"data": [{"text": ...}, ...]}.
_HOLDS_RECORDS = re.compile(rb'\{\s*"[^"]*"\s*:\s*\[\s*\{')
_NEXT_RECORD = re.compile(rb"\}\s*\{")  # of JSON Lines
_NO_SYNTAX_OF_CSV = re.compile(rb'[^",\r\n]+')
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, OSError, pa.ArrowException)

# A text, why there is none, or the fields of a record that lacks the one to read.
Found = str | Reason | tuple[str, ...]
# Where in its file something was found (such as `:3`), what, and its size there.
Item = tuple[str, Found, int]
# A line's number, its text or the reason to reject it, and its length in bytes.
Line = tuple[int, str | Reason, int]


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
        # Conversations count before the template may refuse them, as above: what one source skips,
        # another reads.
        most = self.source.max_documents
        kept = dropped = 0
        for record in records:
            if self.ledger.num_skipped < self.source.skip_documents:
                self.ledger.num_skipped += isinstance(record, Document)
                if not (isinstance(record, Rejected) and record.reason is Reason.DAMAGED_FILE):
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

    def _from_files(self) -> Iterator[Record]:
        for file in self.files:
            try:
                with file.open() as raw:
                    self._raw = raw
                    stream = decompressed(file, raw)
                    if file.format in OF_LINES:
                        # What ends a line of JSON is no text.
                        counts = self.ledger if file.format == ".txt" else None
                        stream = io.BufferedReader(_PlainLines(stream, counts))
                    items = _READERS[file.format](stream, self.source, self._limit)
                    for where, found, num_bytes in items:
                        yield judge(found, f"{file}{where}", num_bytes, self._limit)
            except _DAMAGED as error:
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
            )
            for number, row in enumerate(rows, start=1):
                yield judge(_pick(row, source), f"{source.dataset} row {number}", 0, self._limit)


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


class _PlainLines(io.RawIOBase):
    """Bytes whose lines end in LF, instead of CR or CRLF.

    If they are text, a ledger counts what is changed, and byte order marks are left out: Windows
    programs write them, and files that were joined have some inside.
    """

    def __init__(self, stream: Any, ledger: Ledger | None) -> None:
        self._stream = stream
        self._ledger = ledger
        self._held = b""  # the end of a block, which the next one may go on with

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        most = min(len(buffer), io.DEFAULT_BUFFER_SIZE) - len(_BYTE_ORDER_MARK)
        text = b""
        while not text:
            block = self._stream.read1(most)
            text = self._held + block
            if not text:
                return 0
            ends = (end for end in _CUT_ENDS if block and text.endswith(end))
            self._held = next(ends, b"")
            text = text.removesuffix(self._held)
            text, num_line_ends = _OTHER_LINE_END.subn(b"\n", text)
            if self._ledger is not None:
                self._ledger.num_line_ends += num_line_ends
                self._ledger.num_byte_order_marks += text.count(_BYTE_ORDER_MARK)
                text = text.replace(_BYTE_ORDER_MARK, b"")
        buffer[: len(text)] = text
        return len(text)


def _read_txt(stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Item]:
    lines = _lines(stream, limit + len(_NEWLINE))
    documents: Iterable[Iterable[Line]] = [lines]
    if source.documents != "file":
        parts = groupby(lines, lambda line: isinstance(line[1], str) and not line[1].strip())
        documents = (paragraph for is_blank, paragraph in parts if not is_blank)
    if source.documents == "line":
        documents = ([line] for paragraph in documents for line in paragraph)
    for document in documents:
        yield _join(document, limit)


def _lines(stream: IO[bytes], limit: int) -> Iterator[Line]:
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        length = len(line)
        if length <= limit or line.endswith(b"\n"):
            yield number, _decode(line), length
            continue
        while not line.endswith(b"\n") and (line := stream.readline(_SKIPPED_AT_ONCE)):
            length += len(line)
        yield number, Reason.TOO_LARGE, length


def _decode(text: bytes) -> str | Reason:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return Reason.NOT_UTF8


def _join(lines: Iterable[Line], limit: int) -> Item:
    """Join lines into a document; if a line is bad, reject the document at the first bad line."""
    texts: list[str] = []
    place = 0
    bad = None
    num_bytes = 0
    for number, line, length in lines:
        place = place or number
        num_bytes += length
        if bad is not None:
            continue
        if not isinstance(line, str):
            bad = line
        elif "\0" in line:
            bad = Reason.NUL
        elif num_bytes > limit + len(_NEWLINE):
            bad = Reason.TOO_LARGE
        else:
            texts.append(line)
        if bad is not None:
            place = number
            texts.clear()
    return f":{place or 1}", bad or "".join(texts).rstrip(_NEWLINE), num_bytes


def _read_jsonl(stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Item]:
    for number, line, length in _lines(stream, limit * _JSON_BYTES_PER_TEXT_BYTE):
        found: Found = Reason.NOT_JSON
        if not isinstance(line, str):
            found = line
        elif not (line := line.removeprefix("\ufeff")).strip():
            continue
        else:
            try:
                found = _pick(json.loads(line), source)
            except (ValueError, RecursionError):
                if "\0" in line:
                    found = Reason.NUL
                if number == 1 and line.lstrip().startswith("["):
                    found = Reason.JSON_LIST
        yield f":{number}", found, length


def _read_json(stream: Any, source: TextSource, limit: int) -> Iterator[Item]:
    """Read a JSON list of records, or the only list of an object, which is held in memory; another
    file is JSON Lines, as on the hub.
    """
    start = stream.peek(_SKIPPED_AT_ONCE).removeprefix(_BYTE_ORDER_MARK).lstrip()
    is_object = _HOLDS_RECORDS.match(start) and not _NEXT_RECORD.search(start)
    if not start.startswith(b"[") and not is_object:
        yield from _read_jsonl(stream, source, limit)
        return
    content = stream.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise OSError(
            f"a list of more than {_MAX_JSON_BYTES >> 20} MiB; write one record per line, as .jsonl"
        )
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if is_object:  # a long first line
            yield from _read_jsonl(io.BytesIO(content), source, limit)
            return
        raise OSError(f"not JSON: {error}") from None
    if isinstance(records, dict):
        lists = {key: value for key, value in records.items() if isinstance(value, list)}
        if (source.messages_field or source.text_field) in records or not lists:
            lists = {"": [records]}
        if len(lists) > 1:
            raise OSError(
                f"several lists of records ({', '.join(lists)[:_LONGEST_HEADER]}); write the "
                "records of one, each on a line, as .jsonl"
            )
        (records,) = lists.values()
    for number, record in enumerate(records, start=1):
        yield f": item {number}", _pick(record, source), 0


def _pick(record: Any, source: TextSource) -> Found:
    """Return a record's text, or its messages as JSON, or the reason to reject it."""
    name = source.messages_field or source.text_field
    if not isinstance(record, dict) or name not in record:
        return tuple(record) if isinstance(record, dict) else ()
    value = record[name]
    if source.messages_field is None:
        return value if isinstance(value, str) else Reason.WRONG_TYPE
    if not isinstance(value, list):
        return Reason.WRONG_TYPE
    for message in value:
        turn = message if isinstance(message, dict) else {}
        if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            return Reason.WRONG_TYPE
    if not any(message["role"] == "assistant" for message in value):
        return Reason.NO_ANSWER
    # A dataset's messages may have dates, or bytes.
    return json.dumps(value, ensure_ascii=False, default=str)


def _read_csv(stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Item]:
    csv.field_size_limit(sys.maxsize)  # _CsvLines bounds what is held
    lines = _CsvLines(stream, max(2 * limit, _SKIPPED_AT_ONCE))
    written = iter(lines)
    rows = csv.reader(written)
    header: list[str] = []
    number = 0
    while True:
        lines.num_bytes = 0
        lines.is_cut = False
        found: Found | None = None
        try:
            row = next(rows, None)
        except csv.Error:
            row = header
            found = Reason.NOT_CSV
        if row is None:
            return
        if not row:  # a blank line
            continue
        number += 1
        if not header:
            header = row
            if source.text_field not in header:  # a space may follow each comma
                header = [name.strip() for name in header]
                rows = csv.reader(written, skipinitialspace=True)
            _check_column(header, source)
            continue

        if lines.is_cut:
            found = Reason.TOO_LARGE
        elif len(row) != len(header):
            found = Reason.NOT_CSV
        elif found is None:
            value = row[header.index(source.text_field)]
            found = _decode(value.encode(errors="surrogateescape"))
        yield f": row {number}", found, lines.num_bytes


def _check_column(names: list[str], source: TextSource) -> None:
    if names.count(source.text_field) != 1:
        raise OSError(
            f"needs exactly one column {source.text_field!r}, and has: "
            f"{', '.join(map(repr, names))[:_LONGEST_HEADER]}; set text_field to the one to read"
        )


@dataclass
class _CsvLines:
    """The lines of a table; of a row larger than `limit` bytes, the rest is cut down to its quotes
    and commas.
    """

    stream: IO[bytes]
    limit: int
    num_bytes: int = 0  # of the row so far: whoever reads rows sets it back
    is_cut: bool = False

    def __iter__(self) -> Iterator[str]:
        line = b""
        before = _BYTE_ORDER_MARK
        while part := self.stream.readline(_SKIPPED_AT_ONCE).removeprefix(before):
            before = b""
            self.num_bytes += len(part)
            if self.num_bytes > self.limit:
                self.is_cut = True
                part = _NO_SYNTAX_OF_CSV.sub(b"", part)
            line += part
            if line.endswith(b"\n"):
                # A value that is not UTF-8 is one bad record and does not end the file.
                yield line.decode(errors="surrogateescape")
                line = b""
        if line:
            yield line.decode(errors="surrogateescape")


def _read_parquet(stream: IO[bytes], source: TextSource, _limit: int) -> Iterator[Item]:
    # With a buffer and without pre-buffering, a column is read page by page instead of a row group
    # at once.
    table = pa.parquet.ParquetFile(stream, buffer_size=_SKIPPED_AT_ONCE, pre_buffer=False)
    _check_column(table.schema_arrow.names, source)
    number = 0
    for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[source.text_field]):
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        is_text = any(is_kind(column.type) for is_kind in _TEXT_TYPES)
        values = column.cast(pa.large_binary()).to_pylist() if is_text else [None] * len(column)
        for value in values:
            number += 1
            found = Reason.WRONG_TYPE if value is None else _decode(value)
            yield f": row {number}", found, len(value or b"")


_READERS: dict[str, Callable[[Any, TextSource, int], Iterator[Item]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _conversation(document: Document, tokenizer: PreTrainedTokenizerBase, limit: int) -> Record:
    """Apply the chat template to a document of JSON messages, and mark the assistant's turns as
    learned.
    """
    messages: Messages = json.loads(document.text)
    learned = []
    try:
        whole = write_conversation(tokenizer, messages)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = write_conversation(tokenizer, messages[:number], asks=True)
            after = write_conversation(tokenizer, messages[: number + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                return Rejected(Reason.REWRITTEN, document.place, document.num_bytes)
            learned.append((len(before), len(after)))
    except Exception:  # a template is a program: it may fail in any way
        return Rejected(Reason.NOT_RENDERED, document.place, document.num_bytes)
    return judge(whole, document.place, document.num_bytes, limit, tuple(learned))
