"""A user's text, and what its beginning shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from scale_cli.config.load import checked
from scale_cli.config.sources import CorpusSource, ReadingConfig
from scale_cli.config.vocabulary import SCRIPTS, Script
from scale_cli.data.encoding import Document, Encoder
from scale_cli.data.ledger import check_bad_fraction, check_unknown_fraction
from scale_cli.model.script_prior import share_of_letters
from scale_cli.planning.beginnings import Beginning
from scale_cli.report import percent

BYTES_READ = 1 << 22
FEW_DOCUMENTS = 10  # of fewer, the end of each is held out; of more, one of ten
_SAMPLED = 100_000  # characters that new tokens are learned from
_SAMPLED_DOCUMENTS = 64
_COUNTED_OF_EACH = 500  # characters of such a document, whose tokens are counted
_FEWEST_LINES = 100
_UNEVEN = 1.5  # times the median: so long are some lines of a text whose lines are documents
_MOSTLY = 0.5  # of a text's letters


@dataclass(frozen=True)
class Text:
    """A user's text, and what its beginning shows."""

    flag: str  # that named it
    source: dict[str, Any]  # an entry of a config
    documents: list[str]  # the first
    is_whole: bool  # whether those are all
    bytes_read: int
    num_bytes: int  # of the whole text, estimated if it was not read to the end
    sample: str
    tokens_per_byte: float

    @property
    def is_txt(self) -> bool:
        return re.search(r"\.txt(\.\w+)?$", self.source.get("path", "")) is not None


def look_into(source: dict[str, Any], encoder: Encoder, flag: str) -> Text:
    """Read the beginning of a user's text: files, or a dataset of the hub; errors name its flag.

    A .txt without blank lines is read line by line if its lines vary in length, like comments,
    unlike those of a page.

    Raises:
        CorpusError: it has no document, too many bad ones, or characters that the tokenizer loses.
    """
    text = _read(source, encoder, flag)
    if len(text.documents) < FEW_DOCUMENTS and text.is_txt:
        by_line = _read({**source, "documents": "line"}, encoder, flag)
        lengths = [len(line) for line in by_line.documents]
        if len(lengths) >= _FEWEST_LINES and quantiles(lengths, n=20)[-1] > _UNEVEN * median(
            lengths
        ):
            return by_line
    return text


def _read(source: dict[str, Any], encoder: Encoder, flag: str) -> Text:
    known = checked(CorpusSource, source, flag).model_copy(update={"name": flag})
    beginning = Beginning.of(known, BYTES_READ)
    documents = beginning.documents
    sampled = documents[:: max(1, len(documents) // _SAMPLED_DOCUMENTS)]
    counted = "\n".join(document[:_COUNTED_OF_EACH] for document in sampled)
    num_bytes = len(counted.encode())
    encoded = encoder.encode([Document(counted, num_bytes)])

    reading = ReadingConfig()
    beginning.ledger.num_tokens = len(encoded.ids) if documents else 0  # markers are no text
    check_bad_fraction(known, beginning.ledger, reading.max_bad_fraction)
    check_unknown_fraction(
        known, encoded.round_trip, reading.max_unknown_fraction, is_whole=beginning.is_whole
    )
    return Text(
        flag=flag,
        source=source,
        documents=documents,
        is_whole=beginning.is_whole,
        bytes_read=beginning.bytes_read,
        num_bytes=beginning.num_bytes,
        sample="\n".join(sampled)[:_SAMPLED],
        tokens_per_byte=len(encoded.ids) / max(num_bytes, 1),
    )


def warnings_of(text: Text) -> Iterator[str]:
    """Yield what is odd about a text: letters that its language is not written in."""
    language = text.source["language"]
    if own := Script.of_languages([language]).ranges:
        share = share_of_letters(own, text.sample)
        if share is not None and share < _MOSTLY:
            yield f"{text.flag}: its language is {language}, but {percent(1 - share, 0)} of its letters are others"
        return
    for name, (_, languages) in SCRIPTS.items():
        share = share_of_letters(Script.named(name).ranges, text.sample)
        if share is not None and share > _MOSTLY:
            yield (
                f"{text.flag}: its language is {language}, but {percent(share, 0)} of its letters are {name}, as in "
                f"{', '.join(languages.split())}"
            )
