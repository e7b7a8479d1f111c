"""The files of a source: local ones by a pattern, or by the URL of a store that fsspec reads (hf://, s3://, gs://).

Compressed ones are streams, read to their last byte: what is cut off or damaged says so.

The SHA-256 of a local one is remembered in the cache (`.sources.json`), while the file system says that it is the same:
by its inode, size, and the times of its last write and last change; the latter is the system's own and cannot be set
back. A file that has changed just now is not remembered, for another change might fall into the same tick of that
clock. Damage that a disk does without telling is found in what was tokenised, by `scale verify`.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa

from scale_cli.config.sources import TextSource
from scale_cli.errors import CorpusError, StorageError
from scale_cli.storage.atomic import file_sha256, json_sha256, read_json, write_json

COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_RECORD = ".sources.json"
# Fewer bytes are hashed in a millisecond.
_LEAST_BYTES = 1 << 20
_SETTLED_NS = 2 * 10**9
_READ_AT_ONCE = 1 << 16
# No xz preset needs more than 65 MB to decompress; a header may ask for 4 GB.
_XZ_MEMORY_BYTES = 1 << 30
# What a file may unpack to on the disk: text shrinks to a tenth, a table of it seldom to a fiftieth.
_MAX_UNPACKING, _SMALL_BYTES = 200, 1 << 26
_MAX_LISTED, _GUESSED_BYTES = 10_000, 1 << 14
# Their encodings of one byte a character are told apart by hardly a letter.
_WESTERN = ("ca", "da", "de", "en", "es", "fi", "fr", "is", "it", "nb", "nl", "no", "pt", "sv")


@dataclass(frozen=True)
class Stored:
    """What a store told of a file, asked once."""

    store: Any  # fsspec's file system
    size: int  # in bytes
    content: str  # the hash of all that it told: its own hash, or size and time


@dataclass(frozen=True)
class SourceFile:
    """One file, here or in a store."""

    name: str  # path or URL, as messages give it
    pattern: str = ""  # that found it
    stored: Stored | None = None  # None where the file is local

    def __str__(self) -> str:
        return self.name

    @property
    def compression(self) -> str:
        """The suffix that says how it is compressed; empty where it is not."""
        suffix = PurePosixPath(self.name).suffix
        return suffix if suffix in COMPRESSIONS else ""

    @property
    def format(self) -> str:
        """The suffix that says what it holds."""
        return PurePosixPath(self.name.removesuffix(self.compression)).suffix

    @property
    def size(self) -> int:
        """In bytes, as it lies there."""
        return Path(self.name).stat().st_size if self.stored is None else self.stored.size

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open it for reading from any place; what a store holds is fetched first: it fails as a whole or not."""
        if self.stored is None:
            with Path(self.name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as whole:
            with _named_errors(self.name), self.stored.store.open(self.name, "rb") as stored:
                shutil.copyfileobj(stored, whole)
            whole.seek(0)
            yield whole

    def content(self, hashes: SourceHashes) -> str:
        """Return what names its content."""
        return hashes.sha256(Path(self.name)) if self.stored is None else self.stored.content


def source_files(source: TextSource) -> list[SourceFile]:
    """Return the files of a source: those of each of its patterns by name, none twice."""
    files: dict[str, SourceFile] = {}
    for pattern in source.paths:
        found = _in_store(source.name, pattern) if "://" in pattern else _local(source.name, pattern)
        if not found:
            raise CorpusError(f"{source.name}: no file matches {pattern}")
        for file in found:
            files.setdefault(file.name, file)
    for file in files.values():
        if file.format not in FORMATS:
            known = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}"
            raise CorpusError(f"{file}: not a corpus format (known: {known})")
        if source.messages_field is not None and file.format not in (".jsonl", ".json"):
            raise CorpusError(f"{file}: messages_field: conversations are read of .jsonl, .json and datasets")
        if source.documents != "paragraph" and file.format != ".txt":
            raise CorpusError(f"{file}: documents: {source.documents} is for .txt; here every record is a document")
    return list(files.values())


def _local(name: str, pattern: str) -> list[SourceFile]:
    files = []
    for path in sorted(map(Path, glob.glob(pattern, recursive=True))):
        file = SourceFile(str(path), pattern)
        # Folders that a pattern happens to match are no corpus; one that is named like a file was meant as one.
        if path.is_dir() and file.format not in FORMATS and path != Path(pattern):
            continue
        if not path.is_file():
            if path.is_dir():
                raise CorpusError(f"{name}: {path} is a folder, not a file{_text_in(path)}")
            kind = "a broken link" if not path.exists() else "a pipe or a device"
            raise CorpusError(f"{name}: {path} is {kind}, not a file")
        files.append(file)
    return files


def _text_in(folder: Path) -> str:
    """Return which pattern finds the most text in a folder, for a message; nothing where there is none."""
    for below in ("*", "**/*"):
        files = map(SourceFile, map(str, islice(folder.glob(below), _MAX_LISTED)))
        suffixes = Counter(file.format + file.compression for file in files if file.format in FORMATS)
        if suffixes:
            return f"; give {folder / below}{suffixes.most_common(1)[0][0]}"
    return ""


def _in_store(name: str, pattern: str) -> list[SourceFile]:
    import fsspec  # it, and what it opens a store with, only where a URL asks for them

    with _named_errors(f"{name}: {pattern}"):
        store, path = fsspec.url_to_fs(pattern)
        try:
            found = store.glob(path, detail=True) if glob.has_magic(path) else {path: store.info(path)}
        except FileNotFoundError:
            return []
        return [
            SourceFile(store.unstrip_protocol(one), pattern, _stored(store, one, found[one]))
            for one in sorted(found)
            if found[one]["type"] == "file"
        ]


def _stored(store: Any, path: str, told: dict[str, Any]) -> Stored:
    if told["size"] is None:  # an index page of a web server, which tells names alone
        told = store.info(path)
    if told["size"] is None:
        raise ValueError(f"{path}: its server tells no size, so that a change would go unnoticed; download it")
    return Stored(store, int(told["size"]), json_sha256(told))


@contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Tell in one line what went wrong in a store."""
    try:
        yield
    except Exception as error:  # every store has errors of its own
        raise CorpusError(f"{place} cannot be read ({' '.join(str(error).split()) or type(error).__name__})") from None


class SourceHashes:
    """The hashes of source files, each computed once."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / _RECORD
        self._new: dict[str, dict[str, Any]] = {}

    def sha256(self, file: Path) -> str:
        """Return a file's hash, of the record where the file is the same."""
        before = _stamp(file)
        if before["bytes"] < _LEAST_BYTES:
            return file_sha256(file)
        name = str(file.resolve())
        known = self._recorded.get(name)
        if isinstance(known, dict) and known.items() >= before.items() and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        started_ns, sha256 = time.time_ns(), file_sha256(file)
        last_ns = max(before["written_ns"], before["changed_ns"])
        if _stamp(file) == before and last_ns + _SETTLED_NS < started_ns:
            self._new[name] = {**before, "sha256": sha256}
        return sha256

    @cached_property
    def _recorded(self) -> dict[str, Any]:
        try:
            recorded = read_json(self._path)
        except StorageError:
            return {}
        return recorded if isinstance(recorded, dict) else {}

    def remember(self) -> None:
        """Add what was computed to the record; where that cannot be written, it is computed again another time."""
        if self._new:
            with suppress(StorageError):
                write_json(self._path, self._recorded | self._new)


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {
        "inode": status.st_ino,
        "bytes": status.st_size,
        "written_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }


def likely_encoding(file: SourceFile, language: str) -> str | None:
    """Return what a text is probably written in, as iconv calls it; None where it is UTF-8, or like nothing known."""
    from charset_normalizer import from_bytes  # only for text that is refused

    with suppress(OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException):
        with file.open() as raw, decompressed(file, raw) as stream:
            content = stream.read(_GUESSED_BYTES)
        if len(content) == _GUESSED_BYTES:  # the last character may have been cut
            end = max(content.rfind(b"\n"), content.rfind(b" ")) + 1 or len(content)
            content = content[: end + (b"\0" in content and end % 2)]
        as_utf8 = content.decode(errors="replace")
        num_bad = as_utf8.count("\ufffd") + as_utf8.count("\0")
        if num_bad <= sum(character > "\x7f" for character in as_utf8) - as_utf8.count("\ufffd"):
            return None  # with some damage
        known = ["utf_16", "utf_16_le", "utf_16_be", "cp1252"] if language in _WESTERN else None
        if found := from_bytes(content, cp_isolation=known).best():
            return found.encoding.upper().replace("_", "-").replace("UTF-16-", "UTF-16")
    return None


@contextmanager
def decompressed(file: SourceFile, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the content of an open file, decompressed where its name says so."""
    if not file.compression:
        yield raw
        return
    if file.size == 0:
        raise EOFError("an empty file is not a compressed one")  # gzip takes it for one without text
    if file.compression == ".gz":
        text: Any = gzip.GzipFile(fileobj=raw)  # buffered already: a second buffer would lose what comes before damage
        yield text
    elif file.compression == ".xz":
        yield io.BufferedReader(_XzStreams(raw), _READ_AT_ONCE)
    else:
        # Arrow's reader says that a stream was cut off; zstandard's ends there as if it were whole.
        stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        yield io.BufferedReader(stream)


class _XzStreams(io.RawIOBase):
    """The streams of an .xz file, one after another; Python's own reader drops a damaged one after the first."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            more = b""
            if self._stream.eof:
                more = self._stream.unused_data.lstrip(b"\0")  # zeros may pad it
                while not more:
                    if not (block := self._raw.read(_READ_AT_ONCE)):
                        return 0
                    more = block.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
            elif self._stream.needs_input and not (more := self._raw.read(_READ_AT_ONCE)):
                raise EOFError("compressed file ended before its end-of-stream marker")
            if data := self._stream.decompress(more, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


@contextmanager
def unpacked(file: SourceFile, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a decompressed stream as a file that can be read from its end, in a temporary file."""
    limit = _SMALL_BYTES + _MAX_UNPACKING * file.size
    with tempfile.TemporaryFile() as whole:
        while block := stream.read(_READ_AT_ONCE):
            if whole.tell() + len(block) > limit:
                raise OSError(f"unpacks to more than {_MAX_UNPACKING} times its size")
            whole.write(block)
        whole.seek(0)
        yield whole
