"""What became of everything that was read of a source: read = kept + dropped, in documents and in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from scale_cli.data.documents import Document, Reason, Record, Rejected
from scale_cli.data.files import SourceFile
from scale_cli.errors import CorpusError
from scale_cli.report.numbers import percent
from scale_cli.storage.records import RunRecord

_PLACES = 3


@dataclass(frozen=True)
class Count:
    """A number of documents, and their bytes."""

    documents: int = 0  # how many
    num_bytes: int = 0  # UTF-8 bytes of their text; of a record without one, its bytes in its file

    def with_one(self, num_bytes: int) -> Count:
        """Return the count with one document more."""
        return Count(self.documents + 1, self.num_bytes + num_bytes)


@dataclass(frozen=True)
class DropCount(Count):
    """What was dropped for one reason."""

    places: tuple[str, ...] = ()  # the first few


@dataclass
class PathCount:
    """What one path of a source gave."""

    files: int = 0  # that it found, and no path before it
    read: Count = Count()
    kept: Count = Count()


@dataclass
class Ledger(RunRecord):
    """The account of one source."""

    FILE = "ledger.json"
    read: Count = Count()  # every record, good or bad
    kept: Count = Count()  # what was tokenised
    dropped: dict[str, DropCount] = field(default_factory=dict)  # the rest, by reason
    files: int = 0  # how many were opened; 0 for a dataset
    damaged_files: tuple[str, ...] = ()  # those that could not be read to their end, the first few by name
    num_damaged_files: int = 0  # all of those
    num_tokens: int = 0  # ids kept, markers included
    # of them, those that stand for text without an id of its own; None: made by an earlier version, which did not count
    # them
    num_unknown_tokens: int | None = None
    num_targets: int | None = None  # of them, those that are learned; None: every one but the first
    paths: dict[str, PathCount] = field(default_factory=dict)  # read and kept, by path; none of a dataset

    @classmethod
    def of_files(cls, paths: Sequence[str], files: Sequence[SourceFile]) -> Self:
        """Return the account of the files that some paths found, before the first is opened."""
        found = Counter(file.pattern for file in files)
        return cls(files=len(files), paths={path: PathCount(found[path]) for path in paths})

    def kept_of(self, records: Iterable[Record], path: Callable[[], str | None] = lambda: None) -> Iterator[Document]:
        """Yield the documents among some records, entering every record; `path` says which the last of them came of."""
        for record in records:
            if isinstance(record, Rejected) and record.reason == Reason.DAMAGED_FILE:
                self.num_damaged_files += 1
                self.damaged_files = (*self.damaged_files, record.place)[:_PLACES]
                continue
            counts: list[Ledger | PathCount] = [self, *([self.paths[found]] if (found := path()) is not None else [])]
            for count in counts:
                count.read = count.read.with_one(record.num_bytes)
            if isinstance(record, Document):
                for count in counts:
                    count.kept = count.kept.with_one(record.num_bytes)
                yield record
            else:
                self._drop(record)

    def _drop(self, record: Rejected) -> None:
        count = self.dropped.get(record.reason.value, DropCount())
        self.dropped[record.reason.value] = replace(
            count,
            documents=count.documents + 1,
            num_bytes=count.num_bytes + record.num_bytes,
            places=(*count.places, record.place)[:_PLACES],
        )

    @property
    def bad_fraction(self) -> float:
        """The dropped share of the records, or the damaged share of the files where that is more."""
        dropped = sum(count.documents for count in self.dropped.values())
        return max(dropped / max(self.read.documents, 1), self.num_damaged_files / max(self.files, 1))

    @property
    def unknown_fraction(self) -> float:
        """The share of the ids that stand for text without one; 0 where it was not counted."""
        return (self.num_unknown_tokens or 0) / max(self.num_tokens, 1)

    @property
    def targets_an_epoch(self) -> int:
        """How many ids are learned in an epoch."""
        return self.num_tokens - 1 if self.num_targets is None else self.num_targets

    def described_losses(self) -> str:
        """Return what was dropped and where, on one line; nothing where nothing was."""
        losses = [(count.documents, reason, count.places) for reason, count in self.dropped.items()]
        if self.num_damaged_files:
            losses.append((self.num_damaged_files, Reason.DAMAGED_FILE.value, self.damaged_files))
        losses.sort(key=lambda loss: -loss[0])
        return "; ".join(
            f"{number:,} {reason}: {', '.join(places)}{', ...' if number > len(places) else ''}"
            for number, reason, places in losses
        )


@dataclass(frozen=True)
class TrainedTokens:
    """What became of one source's target tokens in the first steps of a run.

    Every token of the stream but the first, or of conversations those that are learned, is a target once an epoch, so
    num_trained + num_held_over = num_epochs x (targets_an_epoch - num_left_out).
    """

    num_trained: int  # targets trained, each as often as it was
    num_epochs: int  # epochs begun
    num_held_over: int  # targets of the last of them that were not reached
    num_left_out: int = 0  # targets of windows that were not selected, which no epoch has


@dataclass(frozen=True, kw_only=True)
class SourceTokens(TrainedTokens):
    """The same, and the account of the source."""

    corpus: Ledger


@dataclass(frozen=True)
class TokenLedger(RunRecord):
    """Of every source of a run, by its name: what was read, trained, and left for later."""

    FILE = "token_ledger.json"
    sources: dict[str, SourceTokens]

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return asdict(self)["sources"]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record that a file holds."""
        return super().from_json({"sources": value})


def check_bad_fraction(name: str, ledger: Ledger, max_bad_fraction: float) -> None:
    """Hold a source to a limit: CorpusError where more of it is bad, or none is good, with what and where first."""
    losses = ledger.described_losses()
    if ledger.num_tokens < 2 or not ledger.targets_an_epoch:  # an input and a target
        raise CorpusError(f"{name}: no document with text{f' ({losses})' if losses else ''}")
    if ledger.bad_fraction > max_bad_fraction:
        raise CorpusError(
            f"{name}: {percent(ledger.bad_fraction, 3)} of it is bad, more than corpus.max_bad_fraction "
            f"{max_bad_fraction} allows, among {ledger.read.documents:,} records in {ledger.files:,} files: {losses}"
        )


def check_unknown_fraction(name: str, ledger: Ledger, max_unknown_fraction: float) -> None:
    """Hold a source to what its tokenizer knows."""
    if ledger.unknown_fraction > max_unknown_fraction:
        raise CorpusError(
            f"{name}: {percent(ledger.unknown_fraction)} of its tokens are <unk>, more than "
            f"corpus.max_unknown_fraction {max_unknown_fraction} allows: the base's tokenizer does not know this text, "
            "and its bits/byte would be those of another"
        )
