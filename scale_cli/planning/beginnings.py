"""What the beginning of a text tells of the whole: read in a fraction of a second, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document, forget_settings_of_calls
from scale_cli.data.files import SourceFile
from scale_cli.data.ledger import Ledger
from scale_cli.errors import CorpusError
from scale_cli.evaluation.windows import num_read

_LARGEST_DOCUMENT = 1 << 28  # bytes
_OF_A_DATASET = 1 << 40  # bytes that a dataset is taken to have: more than a first run reads
_BYTES_READ = 1 << 20  # of a held-out text
_CHARACTERS_COUNTED = 4_000  # in tokens
_CHARACTERS_OF_EACH = 1_000
_BYTES_PER_TOKEN = 3  # where no tokenizer is at hand
# Of each held-out text, when an export is compared with the trained model.
DOCUMENTS_COMPARED = 4
LONGEST_COMPARED = 512


@dataclass(frozen=True)
class Beginning:
    """The first documents of a text."""

    documents: list[str]
    is_whole: bool  # whether those are all
    bytes_read: int  # of these documents
    num_bytes: int  # of the whole text, estimated if it was not read to the end
    ledger: Ledger

    @classmethod
    def of(cls, source: TextSource, most_bytes: int) -> Beginning:
        """Read documents until `most_bytes` are read."""
        reader = CorpusReader(source, _LARGEST_DOCUMENT)
        documents: list[str] = []
        size = 0
        place = 0  # in the files, after these documents
        for record in reader:
            if size >= most_bytes:  # and there is more
                in_all = size * reader.total_bytes // place if place else _OF_A_DATASET
                if rows := _num_rows(reader.files):
                    in_all = size * rows // len(documents)
                return cls(documents, False, size, in_all, reader.ledger)
            if isinstance(record, Document):
                documents.append(record.text)
                size += record.num_bytes
            place = reader.position_bytes
        return cls(documents, True, size, size, reader.ledger)


def _num_rows(files: Sequence[SourceFile]) -> int:
    """Return the rows of local tables by columns, where the place in a file tells nothing; else 0."""
    if not all(file.suffix == ".parquet" and file.store is None for file in files):
        return 0
    return sum(pq.read_metadata(file.name).num_rows for file in files)


@dataclass(frozen=True)
class HeldOut:
    """About how many tokens of a held-out text the rest of a run reads."""

    role: str
    num_tokens: int  # all, by the last evaluation
    num_in_windows: int  # of every document's beginning alone, by the others
    num_compared: int  # by the comparison of an export with the trained model

    @classmethod
    def of(
        cls,
        documents: Sequence[str],
        tokenizer: Tokenizer | None,  # None: three bytes are a token
        *,
        role: str,
        window: int,  # the longest beginning
        context: int,  # the longest document that is read at once
        times: float = 1.0,  # as many documents as these
    ) -> HeldOut:
        sample = "".join(document[:_CHARACTERS_OF_EACH] for document in documents)
        sample = sample[:_CHARACTERS_COUNTED]
        tokens_per_byte = 1 / _BYTES_PER_TOKEN
        if tokenizer is not None and sample:
            num_tokens = len(tokenizer.encode(sample, add_special_tokens=False).ids)
            tokens_per_byte = num_tokens / len(sample.encode())
        lengths = [len(document.encode()) * tokens_per_byte for document in documents]
        in_windows = sum(min(length, window) for length in lengths)
        longest = min(window, LONGEST_COMPARED)
        compared = sum(min(length, longest) for length in lengths[:DOCUMENTS_COMPARED])
        return cls(
            role=role,
            num_tokens=round(times * sum(num_read(round(length), context) for length in lengths)),
            num_in_windows=round(times * in_windows),
            num_compared=round(compared),
        )


def held_out_texts(
    config: RunConfig, tokenizer: Tokenizer | None, num_positions: int
) -> list[HeldOut]:
    """Count what `skip_documents` and `max_documents` leave of each held-out text on this machine.

    Text in a store or on the hub is not counted, nor is text that is not there.
    """
    texts = []
    for source in config.evaluation.perplexity:
        unbounded = source.model_copy(update={"skip_documents": 0, "max_documents": None})
        try:
            text = Beginning.of(unbounded, _BYTES_READ) if source.is_local else None
        except CorpusError:
            continue
        if text is None or not text.documents:
            continue
        num_documents = len(text.documents) * text.num_bytes / text.bytes_read
        num_documents -= source.skip_documents
        if source.max_documents is not None:
            num_documents = min(num_documents, source.max_documents)
        first = source.skip_documents
        typical = text.documents[first:][: source.max_documents] or text.documents
        texts.append(
            HeldOut.of(
                typical,
                tokenizer,
                role=source.role,
                window=config.eval_beginning,
                context=config.evaluation.sequence_length or num_positions,
                times=max(0.0, num_documents) / len(typical),
            )
        )
    return texts


def tokenizer_at_hand(model: ModelConfig) -> Tokenizer | None:
    """Return a base's tokenizer as its tokenizer.json describes it; None if there is none.

    It is good for counting: a run loads the tokenizer by transformers, which imports torch.
    """
    place = model.tokenizer or model.base
    revision = None if model.tokenizer else model.revision
    path = Path(place) / "tokenizer.json"
    with suppress(Exception):  # a damaged file may raise anything, and the hub too
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(place, "tokenizer.json", revision=revision))
        tokenizer = Tokenizer.from_file(str(path))
        forget_settings_of_calls(tokenizer)
        return tokenizer
    return None
