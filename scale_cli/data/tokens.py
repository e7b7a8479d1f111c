"""A corpus as token ids: tokenised once by workers, written by one process, then read from a memory
map.

A cache folder's name hashes everything that decides its content (tokenizer, text, settings). So a
change makes a new folder, and nothing stale is ever read:

    tokens.bin      every document's ids, one after another: uint16, or uint32 for a large vocabulary
    offsets.bin     (documents + 1,) int64: where each document begins in tokens.bin
    num_bytes.bin   (documents,) int64: UTF-8 bytes of each document, for bits per byte
    hashes.bin      (documents,) uint64: of each document's text, to find it in other corpora
    learned.bin     (tokens,) bool: which ids are targets of the loss; only for conversations
    ledger.json     what was read, kept and dropped (data/ledger.py)

While NAME is being made, it is called .NAME.unfinished. .NAME.progress.json (.NAME.joined.json when
parts are joined) says how much of it is safely on disk. A later run cuts the files to that and
continues: it reads the text again from the beginning, but tokenises only the rest. One process
writes, and workers tokenise each document by itself. So the bytes do not depend on the number of
workers or interruptions.

A part is some whole files of a source. Several machines can each tokenise some parts, to folders of
this kind in `parts/`; `TokenCache.open` joins them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from scale_cli.chat_turns import unspecial_marks
from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.conversations import DAY, writes_today
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import (
    Document,
    DocumentMarkers,
    Encoded,
    Flags,
    Ids,
    Integers,
    RoundTrip,
    encode_all,
    encoder_of,
    id_dtype,
    once_a_tokenizer,
)
from scale_cli.data.files import (
    SourceFile,
    content_hashes,
    describe_content,
    file_parts,
    line_rules,
)
from scale_cli.data.ledger import Ledger, check_bad_fraction, check_has_text, check_unknown_fraction
from scale_cli.errors import CorpusError, StorageError
from scale_cli.processes import ALONE, Share
from scale_cli.storage.atomic import (
    described_files,
    file_sha256,
    json_sha256,
    publish_folder,
    read_json,
    sole_user,
    write_json,
    writing,
)
from scale_cli.storage.records import RunRecord
from scale_cli.terminal import progress_bar

PARTS = "parts"  # in a cache: sources that many machines tokenise, part by part
# The file of each of the arrays of a TokenisedCorpus.
COLUMNS = {
    "ids": "tokens.bin",
    "offsets": "offsets.bin",
    "num_bytes": "num_bytes.bin",
    "hashes": "hashes.bin",
    "learned": "learned.bin",
}
_FORMAT_VERSION = 6
_TOKENS_BETWEEN_RECORDS = 1 << 22  # between two records of progress: the most that a kill can cost
# Keys of the saved configuration that say how the tokenizer was loaded, not how it tokenises.
_HOW_LOADED = ("is_local", "local_files_only", "name_or_path", "transformers_version")


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised source, read from its memory map."""

    folder: Path
    ledger: Ledger
    markers: DocumentMarkers  # the tokenizer's marks
    ids: Ids  # (tokens,) all documents, framed by their markers
    offsets: Integers  # (documents + 1,)
    num_bytes: Integers  # (documents,)
    hashes: npt.NDArray[np.uint64]  # (documents,) of the texts
    learned: Flags | None = None  # (tokens,) which ids are targets; None: all

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def name(self) -> str:
        """The cache folder's name, which hashes the text and everything else that decides the ids."""
        return self.folder.name

    def document(self, index: int) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def with_boundary(self, index: int) -> Ids:
        return with_boundary(self.document(index), self.markers.context)


def with_boundary(ids: Ids, boundary: int | None) -> Ids:
    """Return tokens with the boundary before them; if they begin with it, or it is None, as they are."""
    if boundary is None or ids[0] == boundary:
        return ids
    return np.concatenate([np.array([boundary], ids.dtype), ids])


@dataclass(frozen=True)
class TokenCache:
    """A folder of tokenised sources, as one tokenizer with one set of reading settings sees them.

    The folder may also hold those of other tokenizers and settings, under other names.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    show_progress: bool = False

    def open(self, source: TextSource) -> TokenisedCorpus:
        """Open a tokenised source; tokenise it first if the cache does not hold it."""
        folder = self.folder / self.name_of(source)
        if not is_tokenised(folder):
            files = file_parts(source) if (self.folder / PARTS).is_dir() else []
            parts = [self._part_folder(source, part) for part in files]
            if any(map(is_tokenised, parts)):
                # Hold the lock, so that no other process makes parts that this one removes.
                with sole_user(self.folder / PARTS):
                    if not is_tokenised(folder):
                        self.tokenise_parts(source)  # only the missing ones
                        join_parts(source, self, parts, folder)
                    for part in parts:
                        shutil.rmtree(part, ignore_errors=True)
            else:
                tokenise(source, self, folder)
        corpus = self._opened(folder, source)
        check_bad_fraction(source, corpus.ledger, self.reading.max_bad_fraction)
        check_unknown_fraction(source, corpus.ledger.round_trip, self.reading.max_unknown_fraction)
        return corpus

    def open_if_there(self, source: TextSource) -> TokenisedCorpus | None:
        """Open a tokenised source if the cache holds it; CorpusError if the source cannot be read."""
        if not any(self.folder.glob(f"{source.name}-*")):
            return None  # no need to hash the source's files
        return self.open_named(self.name_of(source), source)

    def open_named(self, name: str, source: TextSource) -> TokenisedCorpus | None:
        """Open what a source was when it got this name, if the cache holds it; read no text."""
        folder = self.folder / name
        return self._opened(folder, source) if is_tokenised(folder) else None

    def _opened(self, folder: Path, source: TextSource) -> TokenisedCorpus:
        arrays = _mapped(folder, self.columns_of(source))
        markers = DocumentMarkers.of(self.tokenizer)
        return TokenisedCorpus(folder, Ledger.load(folder), markers, **arrays)

    def columns_of(self, source: TextSource) -> dict[str, str]:
        """Return the arrays of a tokenised source, and the dtype of each."""
        dtypes = {
            "ids": id_dtype(self.tokenizer),
            "offsets": "int64",
            "num_bytes": "int64",
            "hashes": "uint64",
        }
        return dtypes if source.messages_field is None else dtypes | {"learned": "bool"}

    def tokenise_parts(self, source: TextSource, share: Share = ALONE) -> Ledger:
        """Tokenise a share of the parts of a source, for `open` to join; return the share's ledger.

        Only the files of this share are read or hashed.
        """
        account = Ledger()
        for part in file_parts(source)[share.index :: share.num_processes]:
            folder = self._part_folder(source, part)
            if not is_tokenised(folder):
                tokenise(source, self, folder, part)
            account.take(Ledger.load(folder))
        return account

    def name_of(self, source: TextSource) -> str:
        """Return a folder name that hashes a source's text, its settings and the tokenizer."""
        return self._named(source, content=describe_content(source, self.folder))

    def _part_folder(self, source: TextSource, part: Sequence[SourceFile]) -> Path:
        """Return the folder of a part; its name hashes the files' names too, since the part's
        ledger holds them.
        """
        files = [file.name for file in part]
        content = [*content_hashes(part, self.folder), *line_rules(part)]
        return self.folder / PARTS / self._named(source, files=files, content=content)

    def _named(self, source: TextSource, **text: object) -> str:
        # A new source key that changes the text must be added here, or a stale cache is read. Add
        # it only if it differs from its default, or every existing cache becomes useless.
        settings = {
            **text,
            "format": _FORMAT_VERSION,
            "text_field": source.text_field,
            "documents": source.documents,
            "max_documents": source.max_documents,
            "max_document_bytes": self.reading.max_document_bytes,
            "tokenizer": tokenizer_sha256(self.tokenizer),
        }
        if source.skip_documents:
            settings["skip_documents"] = source.skip_documents
        if source.messages_field:
            settings["messages_field"] = source.messages_field
            if writes_today(self.tokenizer):
                settings["day"] = str(DAY)
        if marks := unspecial_marks(self.tokenizer):  # once they were found in texts
            settings["marks"] = sorted(marks)
        return f"{source.name}-{json_sha256(settings)[:16]}"


@once_a_tokenizer  # the name of every source needs it
def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with writing(Path(folder)):
            tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        lines = []
        for file in files:
            content = file_sha256(file)
            if file.name == "tokenizer_config.json":
                settings = json.loads(file.read_text(encoding="utf-8"))
                kept = {key: value for key, value in settings.items() if key not in _HOW_LOADED}
                content = json.dumps(kept, sort_keys=True)
            lines.append(f"{file.name} {content}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Making a folder


def _mapped(folder: Path, columns: dict[str, str]) -> dict[str, Any]:
    return {
        name: np.memmap(folder / COLUMNS[name], dtype, mode="r") for name, dtype in columns.items()
    }


def is_tokenised(folder: Path) -> bool:
    """Return whether a folder holds a whole tokenised source, by file sizes: hashing at every start
    costs too much.
    """
    try:
        files = described_files(folder).items()
        return all((folder / name).stat().st_size == file["bytes"] for name, file in files)
    except (StorageError, FileNotFoundError):  # another process removes a part that it has joined
        return False


def tokenise(
    source: TextSource, cache: TokenCache, folder: Path, part: Sequence[SourceFile] | None = None
) -> None:
    """Tokenise a source, or a `part` of its files, to a folder that is whole or absent; a part may
    be without text.

    The folder is named after its content, so an unfinished one beside it is continued.
    """
    reading = cache.reading
    encoder = encoder_of(cache.tokenizer, conversations=source.messages_field is not None)
    reader = CorpusReader(source, reading.max_document_bytes, cache.tokenizer, files=part)
    documents = (record for record in reader if isinstance(record, Document))

    def encoded_after(num_done: int) -> Iterator[Encoded]:
        # Reads them again, so that the ledger counts them.
        next(islice(documents, num_done, num_done), None)
        num_workers = reading.num_workers or len(os.sched_getaffinity(0))
        with progress_bar(
            total=reader.total_bytes or None,
            desc=f"tokenising {source.name}",
            unit="B",
            unit_scale=True,
            disable=not cache.show_progress,
            leave=False,
        ) as bar:
            for encoded in encode_all(documents, encoder, num_workers):
                yield encoded
                bar.update(reader.position_bytes - bar.n)

    _write(
        source,
        cache,
        folder,
        "progress",
        encoded_after,
        reader.ledger,
        may_be_empty=part is not None,
    )


def join_parts(source: TextSource, cache: TokenCache, parts: Sequence[Path], folder: Path) -> None:
    """Join tokenised parts into the folder that `tokenise` would write for the source; progress
    counts whole parts.
    """
    ledger = Ledger()

    def encoded_after(num_done: int) -> Iterator[Encoded]:
        for part in parts:
            account = Ledger.load(part)
            ledger.take(account)
            # Skip the parts that are joined already; a part is joined whole.
            if account.kept.documents and ledger.kept.documents > num_done:
                of = _mapped(part, cache.columns_of(source))
                yield Encoded(
                    of["ids"],
                    np.diff(of["offsets"]),
                    of["num_bytes"],
                    of["hashes"],
                    account.round_trip,
                    of.get("learned"),
                )

    _write(source, cache, folder, "joined", encoded_after, ledger)


def _write(
    source: TextSource,
    cache: TokenCache,
    folder: Path,
    progress_name: str,
    encoded_after: Callable[[int], Iterator[Encoded]],
    ledger: Ledger,  # filled while `encoded_after` is read
    *,
    may_be_empty: bool = False,
) -> None:
    """Write the documents that are not safely on disk yet, and publish the folder with its ledger.

    `encoded_after` is called with the number of documents that are.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    progress = folder.with_name(f".{folder.name}.{progress_name}.json")
    with sole_user(unfinished):
        if is_tokenised(folder):  # by another process, while this one waited
            unfinished.rmdir()
            return
        shutil.rmtree(folder, ignore_errors=True)  # its name shows that it is ours: it is damaged
        with _Columns(unfinished, progress, cache.columns_of(source)) as columns:
            for encoded in encoded_after(columns.written.documents):
                columns.append(encoded)
        ledger.num_tokens = columns.written.tokens
        ledger.round_trip = columns.written.round_trip
        if source.messages_field is not None:
            ledger.num_targets = 0
            if ledger.num_tokens:  # an empty file cannot be mapped
                learned = np.memmap(unfinished / COLUMNS["learned"], np.bool_, mode="r")
                ledger.num_targets = int(learned[1:].sum())  # the stream's first id is no target
        try:
            if not may_be_empty:
                check_has_text(source, ledger)
        except CorpusError:
            shutil.rmtree(unfinished)
            progress.unlink()
            raise
        ledger.save(unfinished)
        publish_folder(unfinished, folder)
        for kind in ("progress", "joined"):  # an earlier run may have begun the other way
            folder.with_name(f".{folder.name}.{kind}.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class _Written(RunRecord):
    """How much of an unfinished folder is written; its progress file holds this."""

    documents: int
    tokens: int
    round_trip: RoundTrip
    sizes: dict[str, int]  # of the files, in bytes, by array


class _Columns:
    """The files of an unfinished folder, cut to what is safely on disk and then appended to."""

    def __init__(self, folder: Path, progress: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._progress = progress
        self._files: dict[str, IO[bytes]] = {}
        sizes = dict.fromkeys(names, 0) | {"offsets": 8}  # the first offset, 0
        self.written = _Written(0, 0, RoundTrip(), sizes)
        # What the progress file says, if the files are at least that long.
        with suppress(StorageError, ValueError, FileNotFoundError):
            written = _Written.from_json(read_json(progress))
            if written.sizes.keys() == sizes.keys() and all(
                (folder / COLUMNS[name]).stat().st_size >= size
                for name, size in written.sizes.items()
            ):
                self.written = written
        self._recorded_tokens = self.written.tokens

    def __enter__(self) -> _Columns:
        with writing(self._folder):
            for name, size in self.written.sizes.items():
                self._files[name] = (self._folder / COLUMNS[name]).open("ab")
                if not self.written.documents:
                    self._files[name].truncate(0)
                # Cuts a file; an empty offsets.bin grows to its first offset, 0.
                self._files[name].truncate(size)
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            # A full disk can take no record.
            if failed is None or not issubclass(failed, StorageError):
                self._record()
        finally:
            with writing(self._folder):
                for file in self._files.values():
                    file.close()

    def append(self, encoded: Encoded) -> None:
        """Write some documents; after enough of them, sync the files and record the progress."""
        offsets = self.written.tokens + np.cumsum(encoded.lengths)
        arrays: dict[str, Any] = vars(encoded) | {"offsets": offsets}
        with writing(self._folder):
            for name, file in self._files.items():
                file.write(arrays[name].data)
        # In one statement: if a signal ends the process here, no count may be recorded without the
        # others.
        self.written = _Written(
            self.written.documents + len(encoded.lengths),
            self.written.tokens + len(encoded.ids),
            self.written.round_trip + encoded.round_trip,
            {name: size + arrays[name].nbytes for name, size in self.written.sizes.items()},
        )
        if self.written.tokens - self._recorded_tokens >= _TOKENS_BETWEEN_RECORDS:
            self._record()

    def _record(self) -> None:
        with writing(self._folder):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        write_json(self._progress, self.written.to_json())
        self._recorded_tokens = self.written.tokens
