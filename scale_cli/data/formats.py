"""The formats of corpus files: how the records of each are read, and what else it takes.

`FORMATS` is the whole list. Memory does not grow with a file: lines, paragraphs and rows are read one
by one, and one above the size limit is skipped without being held.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from scale_cli.config.sources import TextSource
from scale_cli.data.ledger import Ledger, Reason

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
_LIST_OF_RECORDS = re.compile(r"\[\s*\{")
_BLANKS = re.compile(r"\s*")
_NEXT_RECORD = re.compile(rb"\}\s*\{")  # of JSON Lines
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\Z)')
_NO_SYNTAX_OF_CSV = re.compile(rb'[^",\r\n]+')
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)

# A text, why there is none, or the fields of a record that lacks the one to read.
Found = str | Reason | tuple[str, ...]
# Where in its file something was found (such as `:3`), what, and its size there.
Item = tuple[str, Found, int]
# A line's number, its text or the reason to reject it, and its length in bytes.
Line = tuple[int, str | Reason, int]


@dataclass(frozen=True)
class CorpusFormat:
    """A format of corpus files."""

    endings: tuple[str, ...]  # of its files; the first is in the names of caches
    # Yields the records of a stream, each at most about as large as the limit in bytes.
    read: Callable[[Any, TextSource, int], Iterator[Item]]
    has_lines: bool = False  # which may end in CR or CRLF too
    is_text: bool = False  # text alone: `documents` says where a document ends
    holds_conversations: bool = False
    is_compressible: bool = True


class PlainLines(io.RawIOBase):
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
                found = pick(json.loads(line), source)
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
    is_object = _holds_records(start) and not _NEXT_RECORD.search(_JSON_STRING.sub(b"", start))
    if not start.startswith(b"[") and not is_object:
        yield from _read_jsonl(stream, source, limit)
        return
    content = stream.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        instead = "if it is JSON Lines, name it .jsonl; else " if is_object else ""
        raise OSError(
            f"a list of more than {_MAX_JSON_BYTES >> 20} MiB; {instead}write one record per line, as .jsonl"
        )
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if is_object:  # a long first line
            yield from _read_jsonl(io.BytesIO(content), source, limit)
            return
        raise OSError(f"not JSON: {error}") from None
    if isinstance(records, dict):
        lists = {
            key: value
            for key, value in records.items()
            if isinstance(value, list) and value and isinstance(value[0], dict)
        }
        if (source.messages_field or source.text_field) in records or not lists:
            lists = {"": [records]}
        if len(lists) > 1:
            raise OSError(
                f"several lists of records ({', '.join(lists)[:_LONGEST_HEADER]}); write the "
                "records of one, each on a line, as .jsonl"
            )
        (records,) = lists.values()
    for number, record in enumerate(records, start=1):
        yield f": item {number}", pick(record, source), 0


def _holds_records(start: bytes) -> bool:
    """Return whether JSON begins as an object that holds a list of objects, such as {"version": "1",
    "data": [{"text": ...}, ...]}.
    """
    text = start.decode(errors="ignore")
    read_value = json.JSONDecoder().raw_decode
    mark = "{"
    at = 0
    try:
        while text[at] == mark:
            _, at = read_value(text, _after_blanks(text, at + 1))
            at = _after_blanks(text, _after_blanks(text, at) + 1)  # behind the colon
            if _LIST_OF_RECORDS.match(text, at):
                return True
            _, at = read_value(text, at)
            at = _after_blanks(text, at)
            mark = ","
    except (ValueError, IndexError, RecursionError):
        pass
    return False


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None, "it matches nothing too"
    return blanks.end()


def pick(record: Any, source: TextSource) -> Found:
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
        except csv.Error as error:
            if not header:
                raise OSError(f"not CSV: {error}") from None
            row = header
            found = Reason.NOT_CSV
        if row is None:
            return
        if not row:  # a blank line
            continue
        number += 1
        if not header:
            header = row
            spaced = any(name.startswith(" ") for name in row)  # a space follows each comma
            if spaced and not source.text_field.startswith(" "):
                (row,) = csv.reader([",".join(row)], skipinitialspace=True)
                header = [name.strip() for name in row]
                rows = csv.reader(written, skipinitialspace=True)
            _check_column(header, source)
            continue

        if lines.is_cut:
            found = Reason.TOO_LARGE
        elif lines.is_at_end or len(row) != len(
            header
        ):  # the row asked for another line: it ends within quotes
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
    is_at_end: bool = False

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
        self.is_at_end = True


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


# By ending.
FORMATS = {
    ending: row
    for row in (
        CorpusFormat((".txt", ".md"), _read_txt, has_lines=True, is_text=True),
        CorpusFormat((".jsonl",), _read_jsonl, has_lines=True, holds_conversations=True),
        CorpusFormat((".json",), _read_json, has_lines=True, holds_conversations=True),
        CorpusFormat((".csv",), _read_csv),
        CorpusFormat((".parquet",), _read_parquet, is_compressible=False),
    )
    for ending in row.endings
}
