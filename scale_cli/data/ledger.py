"""Account for everything read from a source: read = kept + dropped, in documents and in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from scale_cli.config.sources import TextSource
from scale_cli.data.encoding import Document, RoundTrip
from scale_cli.errors import CorpusError
from scale_cli.report import percent
from scale_cli.storage.records import RunRecord
from scale_cli.terminal import printable
from scale_cli.values import counted

_PLACES = 3
_FIELDS = 12
_LONGEST_FIELD = 40
_PLAINLY_LOST = 0.1  # of a text's bytes: a sample does not show less


class Reason(Enum):
    """Why a record is not a document."""

    NOT_UTF8 = "not UTF-8"
    NOT_JSON = "not JSON"
    JSON_LIST = "a JSON list instead of one record per line"
    NOT_CSV = "not a row of its table"
    NO_FIELD = "no text field"
    WRONG_TYPE = "text of the wrong type"
    NUL = "NUL character"
    EMPTY = "empty"
    TOO_LARGE = "too large"
    NO_ANSWER = "no turn of the assistant"
    NOT_RENDERED = "refused by the chat template"
    REWRITTEN = "earlier turns that the chat template writes otherwise when more follow"
    DAMAGED_FILE = "unreadable file"  # the part before the damage is read


_REMEDIES = {
    Reason.JSON_LIST.value: " (name the file .json)",
    Reason.TOO_LARGE.value: " (corpus.max_document_bytes is the limit)",
    Reason.NOT_UTF8.value: " (text is read as UTF-8; convert it first, with the encoding that it has: "
    "such as CP949 or UTF-16: `iconv -f CP949 -t UTF-8 OLD > NEW`)",
}


@dataclass(frozen=True)
class Rejected:
    """A record that is not a document."""

    reason: Reason
    place: str  # file:line, or the row
    num_bytes: int  # of its text or, without text, of the record in its file
    fields: tuple[str, ...] = ()  # its fields, if it lacks the one to read


Record = Document | Rejected


@dataclass
class Count:
    """A number of documents, and their bytes."""

    documents: int = 0
    num_bytes: int = 0  # UTF-8 bytes of their text; of a record without one, its bytes in its file

    def take(self, later: Self) -> None:
        self.documents += later.documents
        self.num_bytes += later.num_bytes


@dataclass
class DropCount(Count):
    """What was dropped for one reason."""

    places: tuple[str, ...] = ()  # the first few
    fields: tuple[str, ...] = ()  # of the first record that lacks the field to read

    def take(self, later: Self) -> None:
        super().take(later)
        self.places = (*self.places, *later.places)[:_PLACES]
        self.fields = self.fields or later.fields


@dataclass
class Ledger(RunRecord):
    """The account of one source."""

    FILE = "ledger.json"
    read: Count = field(default_factory=Count)  # every record, good or bad
    kept: Count = field(default_factory=Count)  # tokenised documents
    dropped: dict[str, DropCount] = field(default_factory=dict)  # the rest, by reason
    files: int = 0  # how many were opened; 0 for a dataset
    damaged: DropCount = field(default_factory=DropCount)  # those not read to their end
    num_skipped: int = 0  # documents skipped before the first was read
    num_line_ends: int = 0  # CR or CRLF, read as LF
    num_byte_order_marks: int = 0  # left out
    num_tokens: int = 0  # ids kept, markers included
    round_trip: RoundTrip = field(default_factory=RoundTrip)  # of the kept text
    num_targets: int | None = None  # ids that are learned; None: all but the first

    def enter(self, record: Record) -> None:
        """Count a record; names of files and fields may be no UTF-8, which a ledger's file is."""
        one = Count(1, record.num_bytes)
        if isinstance(record, Document):
            self.read.take(one)
            self.kept.take(one)
            return
        fields = tuple(printable(name[:_LONGEST_FIELD]) for name in record.fields[:_FIELDS])
        dropped = DropCount(1, record.num_bytes, (printable(record.place),), fields)
        if record.reason == Reason.DAMAGED_FILE:
            self.damaged.take(dropped)
        else:
            self.read.take(one)
            self.dropped.setdefault(record.reason.value, DropCount()).take(dropped)

    def take(self, later: Ledger) -> None:
        for reason, count in later.dropped.items():
            self.dropped.setdefault(reason, DropCount()).take(count)
        self.read.take(later.read)
        self.kept.take(later.kept)
        self.files += later.files
        self.damaged.take(later.damaged)
        self.num_skipped += later.num_skipped
        self.num_line_ends += later.num_line_ends
        self.num_byte_order_marks += later.num_byte_order_marks
        self.num_tokens += later.num_tokens
        self.round_trip += later.round_trip

    @property
    def bad_fraction(self) -> float:
        """The dropped share of the records or the damaged share of the files, whichever is larger."""
        dropped = sum(count.documents for count in self.dropped.values())
        return max(
            dropped / max(self.read.documents, 1), self.damaged.documents / max(self.files, 1)
        )

    def described_losses(self) -> str:
        """Return one line that says what was dropped and where; "" if nothing was."""
        losses = dict(self.dropped)
        if self.damaged.documents:
            losses[Reason.DAMAGED_FILE.value] = self.damaged
        lines = []
        for reason, count in sorted(losses.items(), key=lambda loss: -loss[1].documents):
            line = f"{count.documents:,} {reason}: {', '.join(count.places)}"
            if count.documents > len(count.places):
                line += ", ..."
            if count.fields:
                line += (
                    f" (it has {', '.join(count.fields)}; set text_field or messages_field to the one "
                    "to read)"
                )
            lines.append(line + _REMEDIES.get(reason, ""))
        return "; ".join(lines)


@dataclass(frozen=True)
class TrainedTokens:
    """One source's target tokens in the first steps of a run.

    Every token of the stream but the first is a target once an epoch; in conversations, every
    learned token is. So num_trained + num_held_over = num_epochs x the targets of an epoch.
    """

    num_trained: int  # targets trained, counted each time
    num_epochs: int  # epochs begun
    num_held_over: int  # targets of the last epoch begun that were not reached


@dataclass(frozen=True, kw_only=True)
class SourceTokens(TrainedTokens):
    """A source's trained tokens, and the account of the source."""

    corpus: Ledger


@dataclass(frozen=True)
class TokenLedger(RunRecord):
    """For every source of a run, by name: what was read, trained on, and left in its last epoch."""

    FILE = "token_ledger.json"
    sources: dict[str, SourceTokens]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)["sources"]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return super().from_json({"sources": value})


def check_has_text(source: TextSource, ledger: Ledger) -> None:
    """Raise CorpusError if a source has no good record."""
    name = _described(source)
    losses = ledger.described_losses()
    if ledger.num_skipped and not ledger.read.documents:
        raise CorpusError(
            f"{name}: no document is left, because skip_documents skips all {ledger.num_skipped:,}"
        )
    if ledger.num_tokens < 2 or ledger.num_targets == 0:  # an input and a target
        raise CorpusError(f"{name}: no document with text{losses and f' ({losses})'}")


def check_bad_fraction(source: TextSource, ledger: Ledger, max_bad_fraction: float) -> None:
    """Raise CorpusError if a source has too many bad records, or no good one; the message names the
    first places.
    """
    check_has_text(source, ledger)
    if ledger.bad_fraction > max_bad_fraction:
        raise CorpusError(
            f"{_described(source)}: {percent(ledger.bad_fraction, 3)} of it is bad, more than "
            f"corpus.max_bad_fraction {max_bad_fraction} allows, among "
            f"{counted(ledger.read.documents, 'record')} in {counted(ledger.files, 'file')}: "
            f"{ledger.described_losses()}"
        )


def check_unknown_fraction(
    source: TextSource,
    round_trip: RoundTrip,
    max_unknown_fraction: float,
    *,
    is_whole: bool = True,  # whether all of the text was tokenised
) -> None:
    """Raise CorpusError if the tokenizer loses too much of a source's text.

    A sample does not give the share exactly, but shows a script that is lost.
    """
    least = 0.0 if is_whole else _PLAINLY_LOST
    if round_trip.lost_fraction > max(least, max_unknown_fraction):
        raise CorpusError(
            f"{_described(source)}: the tokenizer loses {percent(round_trip.lost_fraction)} of its text, as in "
            f"{round_trip.example!r}, more than corpus.max_unknown_fraction {max_unknown_fraction} allows; it does not "
            "know this text, or its files belong to two models; set model.tokenizer to one that knows the text"
        )


def _described(source: TextSource) -> str:
    return f"{source.name} ({', '.join(source.paths) or source.dataset})"
