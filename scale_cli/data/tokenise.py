"""Making the tokenised form of a source: streamed to disk, by many processes, and resumed where it was killed.

While it is being made, the folder stands beside its place as .NAME.unfinished, and .NAME.progress.json says how much of
its files is certain; a later run cuts them to that and goes on from there. One process writes and the workers only
tokenise, each document alone, so the bytes are the same whatever the number of workers and of interruptions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, Encoded, RoundTrip, TokenizerSpec, encode_all
from scale_cli.data.files import SourceFile
from scale_cli.data.ledger import Ledger, check_bad_fraction
from scale_cli.errors import CorpusError, StorageError
from scale_cli.storage.atomic import described_files, publish_folder, read_json, sole_user, write_json, writing
from scale_cli.storage.records import RunRecord
from scale_cli.terminal import progress_bar

TOKENS, OFFSETS, NUM_BYTES = "tokens.bin", "offsets.bin", "num_bytes.bin"
LEARNED = "learned.bin"  # of conversations
HASHES = "hashes.bin"
# Tokens between two records of progress: what a kill can cost.
_TOKENS_A_SHARD = 1 << 22


def is_tokenised(folder: Path) -> bool:
    """Return whether a source is tokenised there, whole by its sizes: to hash it at every start would cost too much."""
    try:
        sizes = {name: file["bytes"] for name, file in described_files(folder).items()}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (StorageError, FileNotFoundError):  # a part is removed as soon as another process has joined it
        return False
    return whole and sizes.keys() >= {TOKENS, OFFSETS, NUM_BYTES, HASHES, Ledger.FILE}


def tokenise(
    source: TextSource,
    spec: TokenizerSpec,
    folder: Path,
    reading: ReadingConfig,
    *,
    show_progress: bool,
    template_of: PreTrainedTokenizerBase | None = None,
    part: Sequence[SourceFile] | None = None,
) -> None:
    """Write a source's tokens, offsets, bytes and ledger to a folder that is whole or absent.

    The folder is named after its content: what is unfinished beside it is taken to be of the same. Conversations are
    written by `template_of`. Of a `part` of the source's files there may be no text at all.
    """
    reader = CorpusReader(source, reading.max_document_bytes, template_of, files=part)

    def encoded_after(first: int) -> Iterator[Encoded]:
        documents = (record for record in reader if isinstance(record, Document))
        next(islice(documents, first, first), None)  # those are done
        num_workers = reading.num_workers or len(os.sched_getaffinity(0))
        with _bar(source, reader, show_progress) as bar:
            for encoded in encode_all(documents, spec, num_workers):
                yield encoded
                bar.update(reader.position_bytes - bar.n)

    _write(source, spec, folder, reader.ledger, encoded_after, "progress", may_be_empty=part is not None)


def join_parts(source: TextSource, spec: TokenizerSpec, parts: Iterable[Path], folder: Path) -> None:
    """Write what `tokenise` writes of a source, from what it wrote of each part of the source's files."""
    ledger = Ledger()

    def encoded_after(first: int) -> Iterator[Encoded]:
        for part in parts:
            account = Ledger.load(part)
            ledger.take(account)
            yield from _stored(part, spec, first)
            first = max(0, first - account.kept.documents)

    _write(source, spec, folder, ledger, encoded_after, "joined")


def _stored(folder: Path, spec: TokenizerSpec, first: int) -> Iterator[Encoded]:
    """Yield what a folder holds from a document on, so much at once as stands between two records of progress."""

    def read(name: str, dtype: npt.DTypeLike, start: int, end: int) -> npt.NDArray[Any]:
        return np.fromfile(folder / name, dtype, end - start, offset=start * np.dtype(dtype).itemsize)

    offsets = np.fromfile(folder / OFFSETS, np.int64)
    while first < len(offsets) - 1:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _TOKENS_A_SHARD, "right")) - 1)
        tokens = int(offsets[first]), int(offsets[last])
        yield Encoded(
            read(TOKENS, spec.dtype, *tokens),
            np.diff(offsets[first : last + 1]),
            read(NUM_BYTES, np.int64, first, last),
            read(HASHES, np.uint64, first, last),
            RoundTrip(),  # the part's ledger has it
            read(LEARNED, np.bool_, *tokens) if spec.conversations else None,
        )
        first = last


def _write(
    source: TextSource,
    spec: TokenizerSpec,
    folder: Path,
    ledger: Ledger,
    encoded_after: Callable[[int], Iterator[Encoded]],
    progress_name: str,
    *,
    may_be_empty: bool = False,
) -> None:
    """Write to a folder what follows the documents that are there, and publish it with its ledger.

    Tokenising and joining record what is certain by names of their own: only the former has round trips to go on with.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    progress = folder.with_name(f".{folder.name}.{progress_name}.json")
    with sole_user(unfinished):
        if is_tokenised(folder):  # another process made it while this one waited
            unfinished.rmdir()
            return
        shutil.rmtree(folder, ignore_errors=True)  # by its name it is ours, and a damaged one
        with _Shards(unfinished, progress, spec) as shards:
            for encoded in encoded_after(shards.written.documents):
                shards.append(encoded)
            ledger.num_tokens = shards.written.tokens
            ledger.round_trip += shards.written.round_trip
        if spec.conversations:
            ledger.num_targets = _num_targets(unfinished / LEARNED)
        try:
            if not may_be_empty:
                check_bad_fraction(source, ledger, max_bad_fraction=1.0)  # without text there is nothing to open
        except CorpusError:
            shutil.rmtree(unfinished)
            progress.unlink()
            raise
        ledger.save(unfinished)
        publish_folder(unfinished, folder)
        for record in folder.parent.glob(f".{folder.name}.*.json"):
            record.unlink()


def _num_targets(learned: Path) -> int:
    """Count the ids that are learned; what stands first in the stream is nobody's target."""
    with learned.open("rb") as file:
        file.read(1)
        return sum(block.count(b"\1") for block in iter(lambda: file.read(_TOKENS_A_SHARD), b""))


def _bar(source: TextSource, reader: CorpusReader, show: bool) -> Any:
    title, total = f"tokenising {source.name}", reader.total_bytes or None
    return progress_bar(total=total, desc=title, unit="B", unit_scale=True, disable=not show, leave=False)


@dataclass(frozen=True)
class _Written(RunRecord):
    """How much of an unfinished folder there is."""

    documents: int = 0
    tokens: int = 0
    round_trip: RoundTrip = field(default_factory=RoundTrip)


class _Shards:
    """The files of an unfinished folder, cut to what is certain and then appended to."""

    def __init__(self, folder: Path, progress: Path, spec: TokenizerSpec) -> None:
        self._folder, self._progress = folder, progress
        self._dtype, self._conversations = np.dtype(spec.dtype), spec.conversations
        self.written = self._certain()
        self._recorded_tokens = self.written.tokens
        self._files: dict[str, IO[bytes]] = {}

    def _sizes(self, written: _Written) -> dict[str, int]:
        return {
            TOKENS: written.tokens * self._dtype.itemsize,
            OFFSETS: (written.documents + 1) * 8,
            NUM_BYTES: written.documents * 8,
            HASHES: written.documents * 8,
            **({LEARNED: written.tokens} if self._conversations else {}),
        }

    def _certain(self) -> _Written:
        try:
            written = _Written.from_json(read_json(self._progress))
            held = all((self._folder / name).stat().st_size >= size for name, size in self._sizes(written).items())
        except (StorageError, ValueError, FileNotFoundError):
            return _Written()
        return written if held else _Written()

    def __enter__(self) -> _Shards:
        with writing(self._folder):
            for name, size in self._sizes(self.written).items():
                self._files[name] = (self._folder / name).open("ab")
                if not self.written.documents:
                    self._files[name].truncate(0)
                self._files[name].truncate(size)  # longer than before by the first offset, 0
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None or not issubclass(failed, StorageError):  # of a full disk nothing more is asked
                self._record()
        finally:
            with writing(self._folder):
                for file in self._files.values():
                    file.close()

    def append(self, part: Encoded) -> None:
        """Write some documents; after enough of them, make what is written certain."""
        with writing(self._folder):
            self._files[TOKENS].write(part.ids.tobytes())
            self._files[OFFSETS].write((self.written.tokens + np.cumsum(part.lengths)).tobytes())
            self._files[NUM_BYTES].write(part.num_bytes.tobytes())
            self._files[HASHES].write(part.hashes.tobytes())
            if part.learned is not None:
                self._files[LEARNED].write(part.learned.tobytes())
        # In one statement: a signal that ends the process here must not record one without the others.
        self.written = _Written(
            self.written.documents + len(part.lengths),
            self.written.tokens + len(part.ids),
            self.written.round_trip + part.round_trip,
        )
        if self.written.tokens - self._recorded_tokens >= _TOKENS_A_SHARD:
            self._record()

    def _record(self) -> None:
        with writing(self._folder):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        write_json(self._progress, self.written.to_json())
        self._recorded_tokens = self.written.tokens
