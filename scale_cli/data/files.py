"""The files of a source: local ones by a pattern, or by the URL of a store that fsspec reads (hf://, s3://, gs://)."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from scale_cli.config.sources import TextSource
from scale_cli.data.content import SourceHashes
from scale_cli.errors import CorpusError

COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file, here or in a store."""

    name: str  # path or URL, as messages give it
    store: Any = None  # fsspec's file system; None where the file is local

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
        return int(Path(self.name).stat().st_size if self.store is None else self.store.size(self.name))

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open it for reading from any place; what a store holds is fetched first: it fails as a whole or not."""
        if self.store is None:
            with Path(self.name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as whole:
            with _named_errors(self.name), self.store.open(self.name, "rb") as stored:
                shutil.copyfileobj(stored, whole, _READ_AT_ONCE)
            whole.seek(0)
            yield whole

    def content(self, hashes: SourceHashes) -> str:
        """Return what names its content: its hash, or what a store says of it (its own hash, size and time)."""
        if self.store is None:
            return hashes.sha256(Path(self.name))
        told = {**self.store.info(self.name), "etag": self.store.ukey(self.name)}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def source_files(source: TextSource) -> list[SourceFile]:
    """Return the files of a source: those of each of its patterns by name, none twice."""
    files = {file.name: file for pattern in source.paths for file in _matching(source.name, pattern)}
    for file in files.values():
        if file.format not in FORMATS:
            known = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}"
            raise CorpusError(f"{file}: not a corpus format (known: {known})")
        if source.documents == "file" and file.format != ".txt":
            raise CorpusError(f"{file}: documents: file is for .txt; here every record is a document")
    return list(files.values())


def _matching(name: str, pattern: str) -> list[SourceFile]:
    found = _in_store(name, pattern) if "://" in pattern else _local(name, pattern)
    if not found:
        raise CorpusError(f"{name}: no file matches {pattern}")
    return found


def _local(name: str, pattern: str) -> list[SourceFile]:
    files = []
    for path in sorted(map(Path, glob.glob(pattern, recursive=True))):
        file = SourceFile(str(path))
        # Folders that a pattern happens to match are no corpus; one that is named like a file was meant as one.
        if path.is_dir() and file.format not in FORMATS and path != Path(pattern):
            continue
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a broken link" if not path.exists() else "a pipe or a device"
            raise CorpusError(f"{name}: {path} is {kind}, not a file")
        files.append(file)
    return files


def _in_store(name: str, pattern: str) -> list[SourceFile]:
    import fsspec  # it, and what it opens a store with, only where a URL asks for them

    with _named_errors(f"{name}: {pattern}"):
        store, path = fsspec.url_to_fs(pattern)
        found = store.glob(path) if glob.has_magic(path) else [path]
        return [SourceFile(store.unstrip_protocol(one), store) for one in sorted(found) if store.isfile(one)]


@contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Tell in one line what went wrong in a store."""
    try:
        yield
    except Exception as error:  # every store has errors of its own
        raise CorpusError(f"{place} cannot be read ({' '.join(str(error).split()) or type(error).__name__})") from None
