"""Documents, one at a time, from local files (plain or compressed) or a hub dataset; what is bad comes with its place.

Memory does not grow with the corpus: lines, paragraphs and rows are read one by one, and one that is larger than the
limit is passed over without being held.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from scale_cli.config.sources import TextSource
from scale_cli.data.encoding import Spans
from scale_cli.data.files import SourceFile, decompressed, source_files, unpacked
from scale_cli.data.hub import check_dataset, dataset_rows, named_dataset_errors
from scale_cli.errors import CorpusError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A line of JSON is longer than its text: an escape takes up to six bytes for one, and there are other fields.
_JSON_BYTES_PER_TEXT_BYTE = 8
_SKIPPED_AT_ONCE = 1 << 20
_MAX_JSON_BYTES = 1 << 28
_ROWS_AT_ONCE = 256
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


class _Unreadable(Exception):
    """A file that cannot be read, as a table without the column that is."""


_DAMAGED = (_Unreadable, EOFError, lzma.LZMAError, zlib.error, OSError, pa.ArrowException)


class Reason(Enum):
    """Why something that was read is no document."""

    NOT_UTF8 = "not UTF-8"
    NOT_JSON = "not JSON"
    NOT_CSV = "not a row of its table"
    NO_FIELD = "no text field"
    WRONG_TYPE = "text of the wrong type"
    NUL = "NUL character"
    EMPTY = "empty"
    TOO_LARGE = "too large"
    NO_ANSWER = "no turn of the assistant"
    NOT_RENDERED = "refused by the chat template"
    REWRITTEN = "earlier turns that the chat template writes otherwise when more follow"
    DAMAGED_FILE = "damaged file"  # whatever of it came before the damage is read


@dataclass(frozen=True)
class Document:
    """A document that can be tokenised."""

    text: str  # with something but white space in it
    num_bytes: int  # of its UTF-8 form
    place: str = ""  # file:line, or the row
    learned: Spans | None = None  # from where to where it is learned; None: all of it


@dataclass(frozen=True)
class Rejected:
    """Something that is no document."""

    reason: Reason  # why
    place: str  # file:line, or the row
    num_bytes: int  # of its text, or where there is none, as it lies in its file
    fields: tuple[str, ...] = ()  # that it has in the place of the one that is read


Record = Document | Rejected


def described(source: TextSource) -> str:
    """Return a source's name and where it is, for a message."""
    return f"{source.name} ({', '.join(source.paths) or source.dataset})"


class CorpusReader:
    """The records of a source in order, good and bad; iterate once."""

    def __init__(self, source: TextSource, max_document_bytes: int) -> None:
        self.source = source
        self.files = source_files(source)
        self.total_bytes = sum(file.size for file in self.files)
        self._limit = max_document_bytes
        self.path: str | None = None  # of the source's, of whose files the last record was
        self.num_skipped = 0
        self._finished_bytes = 0
        self._raw: IO[bytes] | None = None

    @property
    def position_bytes(self) -> int:
        """How far into its files it has read, of `total_bytes`."""
        return self._finished_bytes + (self._raw.tell() if self._raw is not None else 0)

    def __iter__(self) -> Iterator[Record]:
        records = self._from_files() if self.source.dataset is None else _read_hub(self.source, self._limit)
        documents = (record for record in records if isinstance(record, Document))
        self.num_skipped = sum(1 for _ in islice(documents, self.source.skip_documents))
        most, kept, dropped = self.source.max_documents, 0, 0
        for record in records:
            yield record
            kept, dropped = kept + isinstance(record, Document), dropped + isinstance(record, Rejected)
            # The latter is no corpus, and a dataset on the hub may be endless.
            if most is not None and (kept == most or dropped > most):
                return

    def _from_files(self) -> Iterator[Record]:
        for file in self.files:
            self.path = file.pattern
            try:
                with file.open() as raw:
                    self._raw = raw
                    with decompressed(file, raw) as stream:
                        yield from _READERS[file.format](file, stream, self.source, self._limit)
            except _DAMAGED as error:
                message = " ".join(str(error).split()) or type(error).__name__
                yield Rejected(Reason.DAMAGED_FILE, f"{file} ({message})", 0)
            finally:
                self._raw = None
            self._finished_bytes += file.size


def _lines(stream: IO[bytes], limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield every line's number, content (None where it is longer than the limit) and length in bytes."""
    number = 0
    while line := stream.readline(limit + 1):
        number, length = number + 1, len(line)
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)  # Windows puts one there
        if length <= limit or line.endswith(b"\n"):
            yield number, line, len(line)
            continue
        while not line.endswith(b"\n") and (line := stream.readline(_SKIPPED_AT_ONCE)):
            length += len(line)
        yield number, None, length


def _decoded(line: bytes | None) -> str | Reason:
    if line is None:
        return Reason.TOO_LARGE
    try:
        return line.decode()
    except UnicodeDecodeError:
        return Reason.NOT_UTF8


def _checked_line(line: bytes | None) -> str | Reason:
    text = _decoded(line)
    return Reason.NUL if isinstance(text, str) and "\0" in text else text


class _Gathered:
    """The lines of one document as they come; the first that is bad spoils it."""

    def __init__(self, file: SourceFile, limit: int) -> None:
        self._file, self._limit = file, limit
        self._lines: list[str] = []
        self._first_line = 1
        self._bad: tuple[Reason, int] | None = None
        self.num_bytes = 0

    def add(self, number: int, line: str | Reason, length: int) -> None:
        if not self.num_bytes:
            self._first_line = number
        self.num_bytes += length
        if isinstance(line, str) and self.num_bytes > self._limit + len("\r\n"):
            line = Reason.TOO_LARGE
        if self._bad is not None:
            return
        if isinstance(line, str):
            self._lines.append(line)
        else:
            self._bad = (line, number)
            self._lines.clear()

    def finished(self) -> Record:
        if self._bad is not None:
            return Rejected(self._bad[0], f"{self._file}:{self._bad[1]}", self.num_bytes)
        return judged("".join(self._lines).rstrip("\r\n"), f"{self._file}:{self._first_line}", self._limit)


def _read_txt(file: SourceFile, stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Record]:
    if source.documents == "line":
        yield from _read_lines(file, stream, limit)
        return
    whole, gathered = source.documents == "file", _Gathered(file, limit)
    for number, line, length in _lines(stream, limit):
        checked = _checked_line(line)
        if whole or isinstance(checked, Reason) or checked.strip():
            gathered.add(number, checked, length)
        elif gathered.num_bytes:
            yield gathered.finished()
            gathered = _Gathered(file, limit)
    if whole or gathered.num_bytes:
        yield gathered.finished()


def _read_lines(file: SourceFile, stream: IO[bytes], limit: int) -> Iterator[Record]:
    for number, line, length in _lines(stream, limit + len("\r\n")):
        text = _checked_line(line)
        if isinstance(text, str):
            text = text.rstrip("\r\n")
        if text:
            yield judged(text, f"{file}:{number}", limit, num_bytes=length)


def _read_jsonl(file: SourceFile, stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Record]:
    for number, line, length in _lines(stream, limit * _JSON_BYTES_PER_TEXT_BYTE):
        record = _json_record(line)
        if isinstance(record, Reason):
            yield Rejected(record, f"{file}:{number}", length)
        else:
            yield _picked(record, source, f"{file}:{number}", limit, length)


def _read_json(file: SourceFile, stream: Any, source: TextSource, limit: int) -> Iterator[Record]:
    """Read a list of records, which is held whole; what does not begin as one is lines of JSON, as on the hub."""
    if not stream.peek(_SKIPPED_AT_ONCE).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        yield from _read_jsonl(file, stream, source, limit)
        return
    content = stream.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise _Unreadable(f"a list of more than {_MAX_JSON_BYTES >> 20} MiB; write a record a line, as .jsonl")
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"not JSON: {error}") from None
    for number, record in enumerate(records, start=1):
        yield _picked(record, source, f"{file}: item {number}", limit)


def _json_record(line: bytes | None) -> Any:
    decoded = _decoded(line)
    if isinstance(decoded, Reason):
        return decoded
    if not decoded.strip():
        return Reason.EMPTY
    try:
        return json.loads(decoded)
    except (ValueError, RecursionError):
        return Reason.NUL if "\0" in decoded else Reason.NOT_JSON


def _picked(record: Any, source: TextSource, place: str, limit: int, num_bytes: int = 0) -> Record:
    """Return what a source takes of a record: its text, or its messages as JSON."""
    field = source.messages_field or source.text_field
    if isinstance(record, dict) and field in record:
        return judged(_text_of(record[field], source), place, limit, num_bytes=num_bytes)
    return Rejected(Reason.NO_FIELD, place, num_bytes, tuple(record) if isinstance(record, dict) else ())


def _text_of(value: Any, source: TextSource) -> str | Reason:
    if source.messages_field is None:
        return value if isinstance(value, str) else Reason.WRONG_TYPE
    if not isinstance(value, list) or not all(map(_is_message, value)):
        return Reason.WRONG_TYPE
    if not any(message["role"] == "assistant" for message in value):
        return Reason.NO_ANSWER
    return json.dumps(value, ensure_ascii=False)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _read_csv(file: SourceFile, stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Record]:
    field = source.text_field
    broken: list[int] = []  # rows with too many fields, or too few

    def skip(row: Any) -> str:
        broken.append(row.number)
        return "skip"

    rows = pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=max(2 * limit, _SKIPPED_AT_ONCE)),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip),
        # As bytes: a value that is not UTF-8 is one record then, and not the end of the file.
        convert_options=pa.csv.ConvertOptions(include_columns=[field], column_types={field: pa.binary()}),
    )
    number = 1  # of the titles
    for batch in rows:
        for value in batch.column(0).to_pylist():
            number = next(later for later in count(number + 1) if later not in broken)
            yield judged(_checked_line(value), f"{file}: row {number}", limit, num_bytes=len(value))
    yield from (Rejected(Reason.NOT_CSV, f"{file}: row {row}", 0) for row in broken)


def judged(text: str | Reason, place: str, limit: int, learned: Spans | None = None, *, num_bytes: int = 0) -> Record:
    """Return a document, or why it is none; of what has no text, `num_bytes` is how long it is in its file."""
    if isinstance(text, Reason):
        return Rejected(text, place, num_bytes)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:  # JSON can say "\ud800", half a surrogate pair; no tokenizer can
        return Rejected(Reason.NOT_UTF8, place, len(text.encode(errors="replace")))
    if num_bytes > limit:
        return Rejected(Reason.TOO_LARGE, place, num_bytes)
    if "\0" in text:
        return Rejected(Reason.NUL, place, num_bytes)
    if not text.strip():
        return Rejected(Reason.EMPTY, place, num_bytes)
    return Document(text, num_bytes, place, learned)


def _read_parquet(file: SourceFile, stream: IO[bytes], source: TextSource, limit: int) -> Iterator[Record]:
    if file.compression:
        # It is read from its end, where a decompressor cannot jump, and may be larger than memory.
        with unpacked(file, stream) as whole:
            yield from _read_rows(file, whole, source.text_field, limit)
    else:
        yield from _read_rows(file, stream, source.text_field, limit)


def _read_rows(file: SourceFile, stream: IO[bytes], text_field: str, limit: int) -> Iterator[Record]:
    # Buffered, and not ahead, a row group's column is read page by page instead of whole.
    table = pa.parquet.ParquetFile(stream, buffer_size=_SKIPPED_AT_ONCE, pre_buffer=False)
    names = table.schema_arrow.names
    if names.count(text_field) != 1:
        raise _Unreadable(
            f"{'two columns' if text_field in names else 'no column'} {text_field!r} in: {', '.join(names)}"
        )
    number = 0
    for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[text_field]):
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        holds_text = any(is_kind(column.type) for is_kind in _TEXT_TYPES)
        for scalar in column:
            number += 1
            place = f"{file}: row {number}"
            try:
                text = scalar.as_py() if holds_text else None  # of other types it may fail in other ways
            except UnicodeDecodeError:
                yield Rejected(Reason.NOT_UTF8, place, scalar.as_buffer().size)
                continue
            yield judged(text if isinstance(text, str) else Reason.WRONG_TYPE, place, limit)


def check_source(source: TextSource) -> None:
    """Find out whether a source is there: the first byte of every file read, or the hub (or its cache) asked."""
    if source.dataset is not None:
        check_dataset(source)
        return
    for file in source_files(source):
        try:
            if file.stored is None:  # a store has been asked for it; to open it there is to fetch it
                with file.open() as opened:
                    opened.read(1)
        except OSError as error:
            raise CorpusError(f"{source.name}: {file} cannot be read ({error.strerror or error})") from None


def _read_hub(source: TextSource, limit: int) -> Iterator[Record]:
    with named_dataset_errors(source):
        for number, row in enumerate(dataset_rows(source), start=1):
            yield _picked(row, source, f"{source.dataset} row {number}", limit)


_READERS = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
