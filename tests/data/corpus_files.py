"""Corpus files of every format and compression, and what is read of them."""

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from scale_cli.config.sources import ReadingConfig, TextSource
from scale_cli.data.documents import CorpusReader
from scale_cli.data.encoding import Document
from scale_cli.data.ledger import Reason, Record, Rejected
from scale_cli.data.tokens import TokenCache, TokenisedCorpus

DOCUMENTS = [
    "The first.\nIts second line, 한국어.",
    "둘째 문서",
    "  indented and trailing  \n\tthird",
]
LIMIT = 10_000_000


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def as_txt(documents: list[str]) -> bytes:
    return "\n\n".join(documents).encode()


def as_jsonl(documents: list[str], field: str = "text") -> bytes:
    return "".join(
        json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)
    ).encode()


def as_parquet(documents: Sequence[str | None], field: str = "text") -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"id": range(len(documents)), field: documents}), sink)
    return sink.getvalue()


def as_json(documents: list[str], field: str = "text") -> bytes:
    return json.dumps(
        [{"id": i, field: text} for i, text in enumerate(documents)], indent=1
    ).encode()


def as_csv(documents: list[str], field: str = "text") -> bytes:
    table = io.StringIO(newline="")
    csv.writer(table, quoting=csv.QUOTE_ALL).writerows([["id", field], *enumerate(documents)])
    return table.getvalue().encode()


FORMATS: dict[str, Callable[..., bytes]] = {
    ".txt": as_txt,
    ".jsonl": as_jsonl,
    ".json": as_json,
    ".csv": as_csv,
    ".parquet": as_parquet,
}
# What is read; a parquet file is compressed inside.
READ = [
    (form, compression)
    for form in FORMATS
    for compression in COMPRESSORS
    if form != ".parquet" or not compression
]
forms = pytest.mark.parametrize(("form", "compression"), READ)


def source_of(path: Path | str | list[str] | None, **options: Any) -> TextSource:
    path = str(path) if isinstance(path, Path) else path
    return TextSource.model_validate({"name": "source", "path": path, "language": "ko", **options})


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_bytes(as_jsonl(texts))
    return path


def tokenised(
    path: Path | str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    reading: ReadingConfig | None = None,
    **options: Any,
) -> TokenisedCorpus:
    return TokenCache(cache, tokenizer, reading or ReadingConfig()).open(source_of(path, **options))


def records(path: Path | str | list[str], limit: int = LIMIT, **options: Any) -> list[Record]:
    return list(CorpusReader(source_of(path, **options), limit))


def read(path: Path | str | list[str], **options: Any) -> list[str]:
    """The documents of a source in which nothing is bad."""
    found = records(path, **options)
    assert not dropped(found)
    return kept(found)


def kept(found: list[Record]) -> list[str]:
    return [record.text for record in found if isinstance(record, Document)]


def dropped(found: list[Record]) -> list[tuple[Reason, str]]:
    return [(record.reason, record.place) for record in found if isinstance(record, Rejected)]
