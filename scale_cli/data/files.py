"""Find and open text: local files by a pattern, files of a store that fsspec reads (hf://, s3://,
gs://), hub datasets.

Compressed files are read as streams to their last byte, so that a truncated or damaged one raises
an error.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import shutil
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import pyarrow as pa

from scale_cli.config.sources import TextSource
from scale_cli.data.formats import FORMATS, CorpusFormat
from scale_cli.errors import CorpusError, StorageError, one_line
from scale_cli.storage.atomic import file_sha256, json_sha256, read_json, write_json
from scale_cli.terminal import bytes_bar

COMPRESSIONS = (".gz", ".xz", ".zst")
_HASHES = ".sources.json"
# A smaller file is hashed in a millisecond.
_LEAST_BYTES = 1 << 20
_AS_TEXT = "; save it as plain text first, such as by "
_REMEDIES = {
    **dict.fromkeys((".docx", ".html", ".epub"), f"{_AS_TEXT}`pandoc FILE -t plain -o FILE.txt`"),
    ".pdf": f"{_AS_TEXT}`pdftotext FILE FILE.txt`",
}
_SETTLED_NS = 2 * 10**9
_READ_AT_ONCE = 1 << 16
_LOOKED_AT = 10_000  # names in a folder, for a pattern
# Decompression limit: no xz preset needs more than 65 MB, but a header may ask for 4 GB.
_XZ_MEMORY_BYTES = 1 << 30
# Smallest part for one of many processes: large enough that starting and ending it costs little.
_PART_BYTES = 1 << 26


@dataclass(frozen=True)
class SourceFile:
    """One file, local or in a store."""

    name: str  # path or URL, as messages give it
    size: int  # in bytes, as stored
    store: Any = None  # fsspec's file system; None if the file is local
    # hash of the metadata from the store, such as the content's hash, or size and time
    told: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def compression(self) -> str:
        """The suffix of its compression; empty if it is not compressed."""
        suffix = PurePosixPath(self.name).suffix
        return suffix if suffix in COMPRESSIONS else ""

    @property
    def suffix(self) -> str:
        """The suffix that tells its format, before that of its compression."""
        return PurePosixPath(self.name.removesuffix(self.compression)).suffix

    @property
    def ending(self) -> str:
        """The suffixes that say how it is read, such as .txt.xz."""
        return self.suffix + self.compression

    @property
    def format(self) -> CorpusFormat:
        """Its format; `source_files` lets through only files that have one."""
        return FORMATS[self.suffix]

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open it for reading; a file in a store is fetched whole first, so that it fails as a
        whole or not at all.
        """
        if self.store is None:
            with Path(self.name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as whole:
            with named_errors(self.name), self.store.open(self.name, "rb") as stored:
                shutil.copyfileobj(stored, whole)
            whole.seek(0)
            yield whole


@contextmanager
def named_errors(place: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turn any error into a one-line CorpusError that names `place`; stores and datasets each have
    their own errors.
    """
    try:
        yield
    except Exception as error:
        raise CorpusError(
            f"{place} {problem} ({getattr(error, 'strerror', None) or one_line(error)})"
        ) from None


def source_files(source: TextSource) -> list[SourceFile]:
    """Return the files of a source, each once: pattern by pattern, sorted by name."""
    files: dict[object, SourceFile] = {}
    for pattern in source.paths:
        is_url = "://" in pattern
        found = _in_store(source.name, pattern) if is_url else _local(source.name, pattern)
        if not found:
            here = "" if is_url or Path(pattern).is_absolute() else f" in {Path.cwd()}"
            other = ""
            if not is_url and glob.has_magic(Path(pattern).name):
                other = _pattern_of(Path(pattern).parent, "*")
            raise CorpusError(
                f"{source.name}: no file matches {pattern}{here}{other and f'; give {other}'}"
            )
        for file in found:
            # A local file is the same by all its names: the inode and the device.
            same = Path(file.name).stat()[1:3] if file.store is None else file.name
            files.setdefault(same, file)

    for file in files.values():
        if problem := _misfit(source, file):
            raise CorpusError(f"{file}: {problem}")
    return list(files.values())


def _misfit(source: TextSource, file: SourceFile) -> str:
    """Return why a file cannot be read as a source asks; "" if it can."""
    form = FORMATS.get(file.suffix)
    if form is None or (file.compression and not form.is_compressible):
        plain_only = [ending for ending, row in FORMATS.items() if not row.is_compressible]
        return (
            f"not a corpus format (known: {', '.join(FORMATS)}; all but {', '.join(plain_only)} also "
            f"with {', '.join(COMPRESSIONS)}){_REMEDIES.get(file.suffix.lower(), '')}"
        )
    if source.messages_field is not None and not form.holds_conversations:
        holding = [ending for ending, row in FORMATS.items() if row.holds_conversations]
        return f"messages_field: conversations are read only from {', '.join(holding)} and datasets"
    if source.documents != "paragraph" and not form.is_text:
        return f"documents: {source.documents} is for .txt; here every record is a document"
    if source.text_field != TextSource.model_fields["text_field"].default and form.is_text:
        return f"text_field: {source.text_field} names a column or key, and this file is all text"
    return ""


def _matches(pattern: str) -> list[Path]:
    """Return what a pattern matches, part by part; a name that exists as it is written is no
    pattern.

    Names may be in another normal form than the pattern, as macOS writes Hangul and accents.
    """
    found = {Path()}
    for part in Path(pattern).parts:
        forms = [part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD"))]
        below = set[Path]()
        for folder in found:
            same = [folder / form for form in forms if os.path.lexists(folder / form)]
            names = [
                name for form in forms for name in glob.glob(form, root_dir=folder, recursive=True)
            ]
            below.update(same[:1] or (folder / name for name in names))
            if part == "**" and not same:
                below.add(folder)  # without a folder between
        found = below
    return sorted(found)


def _pattern_of(folder: Path, names: str) -> str:
    """Return a pattern of the commonest corpus files in a folder; "" if there are none."""
    files = (SourceFile(str(path), 0) for path in islice(folder.glob(names), _LOOKED_AT))
    endings = Counter(file.ending for file in files if file.suffix in FORMATS)
    return f"{folder / names}{max(endings, key=endings.__getitem__)}" if endings else ""


def _local(name: str, pattern: str) -> list[SourceFile]:
    files = []
    for path in _matches(pattern):
        if path.is_file():
            files.append(SourceFile(str(path), path.stat().st_size))
        # Folders that a pattern happens to match are ignored; a folder that is named like a file is
        # an error.
        elif not path.is_dir():
            raise CorpusError(f"{name}: {path} is a broken link or a device, not a file")
        elif path.suffix in (*FORMATS, *COMPRESSIONS) or path == Path(pattern):
            such = _pattern_of(path, "**/*") or f"{path}/**/*.txt"
            raise CorpusError(
                f"{name}: {path} is a folder, not a file; give a pattern, such as {such}"
            )
    return files


def _in_store(name: str, pattern: str) -> list[SourceFile]:
    import fsspec  # imported only for URLs

    with named_errors(f"{name}: {pattern}"):
        store, path = fsspec.url_to_fs(pattern)
        try:
            is_pattern = glob.has_magic(path)
            found = store.glob(path, detail=True) if is_pattern else {path: store.info(path)}
        except FileNotFoundError:
            return []
        files = []
        for one, told in sorted(found.items()):
            if told["type"] != "file":
                continue
            if told["size"] is None:  # a server's index page gives only names
                told = store.info(one)
            if told["size"] is None:
                raise ValueError(
                    f"{one}: its server tells no size, so a change would go unnoticed; download "
                    "the file"
                )
            url = store.unstrip_protocol(one)
            files.append(SourceFile(url, int(told["size"]), store, json_sha256(told)))
        return files


def file_parts(source: TextSource) -> list[list[SourceFile]]:
    """Return the files of a source in consecutive parts, the same in every process.

    There are no parts if one process has to read everything: a dataset, or documents counted from
    the beginning.
    """
    if source.dataset is not None or source.skip_documents or source.max_documents is not None:
        return []
    parts: list[list[SourceFile]] = []
    for file in source_files(source):
        if not parts or sum(before.size for before in parts[-1]) >= _PART_BYTES:
            parts.append([])
        parts[-1].append(file)
    return parts


def content_hashes(files: Sequence[SourceFile], cache_dir: Path) -> list[str]:
    """Return a hash of each file's content: the SHA-256 of a local file, or the hash of a store's
    metadata.

    The cache remembers the SHA-256 of a local file for the same path, inode, size and times of last
    write and change; a program cannot set the time of change back. A file that changed just now is
    not remembered: another change might fall into the same clock tick.
    """
    remembered = cache_dir / _HASHES
    known: dict[str, Any] = {}
    with suppress(StorageError, TypeError, ValueError):
        known = dict(read_json(remembered))
    before = {**known}
    hashes = []
    num_bytes = sum(file.size for file in files if file.store is None)
    with bytes_bar("hashing text", num_bytes) as moved:
        for file in files:
            if file.store is not None:
                hashes.append(file.told)
                continue
            path = Path(file.name)
            started_ns = time.time_ns()
            with named_errors(file.name):
                status = path.stat()
                times_ns = [status.st_mtime_ns, status.st_ctime_ns]
                key = json.dumps([str(path.resolve()), status.st_ino, status.st_size, *times_ns])
                sha256 = known.get(key)
                if isinstance(sha256, str):
                    moved(status.st_size)
                else:
                    sha256 = file_sha256(path, moved)
                    if max(times_ns) + _SETTLED_NS < started_ns and status.st_size >= _LEAST_BYTES:
                        known[key] = sha256
            hashes.append(sha256)
    if known != before:
        with suppress(StorageError):  # the hashes are then computed again
            write_json(remembered, known)
    return hashes


def decompressed(file: SourceFile, raw: IO[bytes]) -> IO[bytes]:
    if not file.compression:
        return raw
    if file.size == 0:  # gzip would read it as empty text
        raise EOFError("the file is empty, so it is not a compressed file")
    if file.compression == ".gz":  # another buffer would lose text before damage
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    # Arrow's reader reports a truncated stream of zstd; that of zstandard ends there without an
    # error.
    stream: Any = (
        _XzStreams(raw)
        if file.compression == ".xz"
        else pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    )
    return io.BufferedReader(stream, _READ_AT_ONCE)


class _XzStreams(io.RawIOBase):
    """Read the streams of an .xz file one after another; Python's reader drops a damaged one after
    the first.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            more = b""
            if self._stream.eof:
                more = self._stream.unused_data.lstrip(b"\0")  # zeros may pad a stream
                while not more:
                    if not (block := self._raw.read(_READ_AT_ONCE)):
                        return 0
                    more = block.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
            elif self._stream.needs_input and not (more := self._raw.read(_READ_AT_ONCE)):
                raise EOFError("compressed file ended before its end-of-stream marker")
            data = self._stream.decompress(more, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def dataset_builder(source: TextSource) -> Any:
    """Return the builder of a dataset, without loading it; its `hash` is the commit of the
    revision.
    """
    import datasets

    folder = Path(source.dataset or "")
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise CorpusError(
            f"{source.name}: the dataset {folder} was written by save_to_disk; write it as parquet and give that as "
            f"path: python -c \"import datasets; d = datasets.load_from_disk('{folder}'); "
            f"getattr(d, 'get', lambda _: d)('{source.split}').to_parquet('{folder}.parquet')\""
        )
    with dataset_errors(source):
        return datasets.load_dataset_builder(
            source.dataset, source.subset, revision=source.revision
        )


def refusing_mixed_types(source: TextSource) -> dict[str, str]:
    """Return options with which a dataset of JSON ends at a column of texts and other values.

    Without them datasets 5 gives all later texts of the column as JSON, in quotes and escapes.
    """
    is_json = hasattr(dataset_builder(source).config, "on_mixed_types")
    return {"on_mixed_types": "refuse"} if is_json else {}  # whatever is not its default


def dataset_errors(source: TextSource) -> AbstractContextManager[None]:
    return named_errors(f"{source.name}: the dataset {source.dataset}", "cannot be loaded")


def check_source(source: TextSource) -> None:
    """Raise CorpusError if a source is missing: read a byte of every local file, or ask the store,
    hub or hub cache.
    """
    if source.dataset is not None:
        splits = [str(split) for split in dataset_builder(source).config.data_files or ()]
        if splits and source.split not in splits:
            known = ", ".join(splits)
            raise CorpusError(
                f"{source.name}: the dataset {source.dataset} has no split {source.split!r}; it has {known}"
            )
    for file in source_files(source):
        if file.store is None:  # the store has listed it already; opening it would fetch it
            with named_errors(f"{source.name}: {file}"), file.open() as opened:
                opened.read(1)


def line_rules(files: Sequence[SourceFile]) -> list[object]:
    """Return a description of how lines end, if these files have any: before, they ended in LF
    alone.
    """
    return ["CR, LF, CRLF"] if any(file.format.has_lines for file in files) else []


def describe_content(source: TextSource, cache_dir: Path) -> list[object]:
    """Return a description of a source's content, with a hash for every file."""
    if source.dataset is None:
        files = source_files(source)
        kinds = [file.format.endings[0] + file.compression for file in files]
        hashes = content_hashes(files, cache_dir)
        return [*zip(kinds, hashes, strict=True), *line_rules(files)]
    place = Path(source.dataset)
    if not place.is_dir():
        return [source.dataset, source.subset, source.split, dataset_builder(source).hash]
    files = [SourceFile(str(file), 0) for file in sorted(place.rglob("*")) if file.is_file()]
    names = [str(Path(file.name).relative_to(place)) for file in files]
    contents = list(zip(names, content_hashes(files, cache_dir), strict=True))
    return [source.subset, source.split, contents]
