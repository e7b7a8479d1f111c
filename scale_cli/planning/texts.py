"""A user's text, looked into: how much it is, what its documents are, and which of them are held out."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import checked
from scale_cli.config.sources import CorpusSource, ReadingConfig
from scale_cli.config.vocabulary import SCRIPTS, VocabularyConfig
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document
from scale_cli.data.ledger import check_bad_fraction
from scale_cli.errors import BaseModelError, ConfigError, CorpusError
from scale_cli.vocabulary.extension import extended
from scale_cli.vocabulary.tokenizer import Extension, most_added

_FILES = re.compile(r".*\.(txt|jsonl|json|csv|parquet)(\.(gz|xz|zst))?")
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]*))?")
# Of a text: documents are counted up to there, and tokens on a sample of those; a file of a single one may be large.
_BYTES_READ, _BYTES_SAMPLED, _LARGEST_DOCUMENT = 1 << 22, 1 << 18, 1 << 28
_HELD_OUT_DOCUMENTS, _HELD_OUT_BYTES, _MOST_HELD_OUT = 32, 1 << 16, 10  # of 10 documents one at most
_OF_A_DATASET = 1 << 40  # bytes: more than a first run reads
_FEWEST_LINES, _UNEVEN = 100, 1.5
_PIECE, _LARGEST_PIECE = 2_000, 500_000  # characters
# A script whose letters cost more tokens than this is spelt in bytes; fewer new tokens than that save little.
_TOKENS_PER_CHARACTER, _FEWEST_NEW = 2.0, 256
_SURE = 0.8  # of the tokens that a text gives, those that it gives too when a part of it is held out


@dataclass(frozen=True)
class Text:
    """A text of a user's, and what its beginning shows."""

    source: dict[str, Any]  # as a config calls it
    documents: list[str]  # the first
    is_whole: bool  # whether those are all
    num_bytes: int  # of all of it, as far as that can be told
    sample: str
    tokens_per_byte: float

    @property
    def num_tokens(self) -> int:
        """Of all of it, about."""
        return int(self.num_bytes * self.tokens_per_byte)


@dataclass(frozen=True)
class Parted:
    """A text in two: what is trained on, and what is held out."""

    trained_on: dict[str, Any]  # as a config calls them
    held_out: dict[str, Any]
    words: str  # where its documents went
    files: dict[Path, list[str]] = field(default_factory=dict)  # documents to be written, where those files are new


def look_into(name: str, given: str, language: str, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Read the beginning of what a user names: files, or a dataset of the hub.

    A .txt without blank lines is read line by line where its lines are not those of a page: comments, sentences.
    """
    text = _read(source_of(name, given, language), tokenizer)
    if len(text.documents) < _MOST_HELD_OUT and _is_txt(text.source):
        by_line = _read({**text.source, "documents": "line"}, tokenizer)
        lengths = [len(line) for line in by_line.documents]
        if len(lengths) >= _FEWEST_LINES and quantiles(lengths, n=20)[-1] > _UNEVEN * median(lengths):
            return by_line
    return text


def source_of(name: str, given: str, language: str) -> dict[str, Any]:
    """Return what the config calls a text: files where there are any, or a name like one; else a dataset on the hub."""
    dataset = _DATASET.fullmatch(given)
    if dataset is None or _FILES.fullmatch(given) or glob.glob(os.path.expanduser(given)):  # noqa: PTH111
        return {"name": name, "path": given, "language": language}
    place = zip(("dataset", "subset", "split"), dataset.groups(), strict=True)
    return {"name": name, **{key: value for key, value in place if value}, "language": language}


def _is_txt(source: dict[str, Any]) -> bool:
    return re.search(r"\.txt(\.\w+)?$", source.get("path", "")) is not None


def _read(source: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    known = checked(CorpusSource, source, source["name"])
    reader = CorpusReader(known, _LARGEST_DOCUMENT)
    documents, size, is_whole, read_bytes = [], 0, True, 0
    for document in (record for record in reader if isinstance(record, Document)):
        documents.append(document.text)
        size += document.num_bytes
        if size >= _BYTES_READ:
            is_whole, read_bytes = False, reader.position_bytes  # while its file is open
            break
    if not is_whole:
        size = size * reader.total_bytes // read_bytes if read_bytes else _OF_A_DATASET
    sample = "\n".join(documents[:: max(1, len(documents) // 64)])[:_BYTES_SAMPLED]
    num_tokens = reader.ledger.num_tokens = len(tokenizer(sample, add_special_tokens=False).input_ids)
    check_bad_fraction(known, reader.ledger, ReadingConfig().max_bad_fraction)
    return Text(source, documents, is_whole, size, sample, num_tokens / len(sample.encode()))


def part(text: Text, held_name: str, file: Path, num_tokens: int) -> Parted:
    """Hold out a tenth of a text's documents, and some tens at most; of fewer than ten the end of each.

    What a run of `num_tokens` does not read of a large text is left out of both.
    """
    number, size, held = len(text.documents), 0, 0
    if number < _MOST_HELD_OUT and text.is_whole:
        return _cut(text, held_name, file)
    for document in text.documents[: max(1, number // _MOST_HELD_OUT)]:
        held, size = held + 1, size + len(document.encode())
        if held >= _HELD_OUT_DOCUMENTS and size >= _HELD_OUT_BYTES:
            break
    first = {"split": "train"} if "dataset" in text.source else {}
    counted = f"{number:,}" if text.is_whole else f"more than {number:,}"
    kinds = {"paragraph": "text between blank lines", "line": "a line each"}
    each = f" ({kinds[text.source.get('documents', 'paragraph')]})" if _is_txt(text.source) else ""
    most = limit(text, num_tokens)
    rest = f"{most['max_documents']:,} to train on, which is enough for these steps" if most else "the rest to train on"
    return Parted(
        {**text.source, "skip_documents": held, **most},
        {**first, **text.source, "name": held_name, "max_documents": held},
        f"{counted} documents{each}: the first {held:,} held out, {rest}",
    )


def limit(text: Text, num_tokens: int) -> dict[str, int]:
    """Return how much to take of a large text: what a run reads, twice over, and no less than was looked into."""
    if text.is_whole:
        return {}
    num_bytes = sum(len(document.encode()) for document in text.documents)
    enough = ceil(2 * num_tokens / text.tokens_per_byte / num_bytes * len(text.documents))
    return {"max_documents": max(len(text.documents), enough)}


def _cut(text: Text, held_name: str, file: Path) -> Parted:
    """Hold out the last tenth of every document, in files of their own."""
    name, number = text.source["name"], len(text.documents)
    to_train, held_out = [], []
    for document in text.documents:
        pieces = _split(document, min(_PIECE, max(1, len(document) // _MOST_HELD_OUT)))
        at = len(pieces) - max(1, len(pieces) // _MOST_HELD_OUT)
        to_train += _split("".join(pieces[:at]), _LARGEST_PIECE)
        held_out += pieces[at:]
    to_train, held_out = ([piece.strip() for piece in pieces if piece.strip()] for pieces in (to_train, held_out))
    if not held_out or not to_train:
        raise CorpusError(f"{name}: {number} documents of {text.num_bytes:,} bytes: too little to hold some out")
    files = {
        file.with_name(f"{file.stem}.{name}.jsonl"): to_train,
        file.with_name(f"{file.stem}.{held_name}.jsonl"): held_out,
    }
    trained_on, held_source = ({"path": str(path), "language": text.source["language"]} for path in files)
    words = "1 document: its last tenth" if number == 1 else f"{number} documents: the last tenth of each"
    return Parted(
        {"name": name, **trained_on},
        {"name": held_name, **held_source},
        f"{words} held out; written as {' and '.join(path.name for path in files)}",
        files,
    )


def _split(text: str, length: int) -> list[str]:
    """Cut a text after white space, about every so many characters; without white space, anywhere."""
    return re.findall(rf".{{1,{length}}}(?:(?<=\s)|\Z)|.{{1,{length}}}", text, re.DOTALL)


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a text's script would save, or why none are added."""

    words: str
    script: str = ""
    number: int = 0
    tokens_per_byte: float = 0.0  # with them


def offer_tokens(text: Text, tokenizer: PreTrainedTokenizerBase, first_id: int) -> NewTokens:
    """Find new tokens for a text whose characters cost more than two each."""
    cost = text.tokens_per_byte * len(text.sample.encode()) / len(text.sample)
    words = f"{cost:.2f} a character, {1 / text.tokens_per_byte:.2f} bytes each"
    script = _script(text.sample)
    if cost <= _TOKENS_PER_CHARACTER or script is None:
        return NewTokens(words)
    wanted, known = VocabularyConfig(script=script), CorpusSource.model_validate(text.source)
    more = wanted.model_copy(update={"new_tokens": round(wanted.new_tokens / _SURE)})
    try:
        found, _ = Extension(tokenizer, first_id, more, [known], ReadingConfig(), Path()).learned(
            _BYTES_READ, wanted.min_count
        )
    except (BaseModelError, ConfigError) as error:
        return NewTokens(f"{words}; no new ones: {error}")
    number = min(wanted.new_tokens, most_added(first_id, int(_SURE * len(found))))
    if number < _FEWEST_NEW:
        return NewTokens(f"{words}; no new ones: of {script} the text gives {len(found):,}")
    grown = extended(tokenizer.backend_tokenizer, found[:number], first_id)
    per_byte = len(grown.encode(text.sample, add_special_tokens=False).ids) / len(text.sample.encode())
    return NewTokens(
        f"{words}; with {number:,} new ones of {script} {1 / per_byte:.2f} bytes", script, number, per_byte
    )


def _script(sample: str) -> str | None:
    """Return the script of most letters beyond ASCII."""
    letters = Counter[str]()
    for character, number in Counter(sample).items():
        for name, ranges in SCRIPTS.items():
            letters[name] += number * any(first <= ord(character) <= last for first, last in ranges)
    name, number = letters.most_common(1)[0]
    return name if number else None
