"""Documents, one at a time, from local files (plain or compressed) or a hub dataset."""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from scale_cli.config.schema import TextSource
from scale_cli.errors import CorpusError

COMPRESSIONS = (".gz", ".xz", ".zst")
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, OSError, pa.ArrowException)


def source_files(source: TextSource) -> list[Path]:
    """Return the local files of a source, sorted by name.

    Raises:
        CorpusError: nothing matches, or a file is of no format that is read.
    """
    assert source.path is not None
    files = sorted(Path(name) for name in glob.glob(source.path, recursive=True) if Path(name).is_file())
    if not files:
        raise CorpusError(f"{source.name}: no file matches {source.path}")
    for file in files:
        if _format(file) not in _READERS:
            raise CorpusError(
                f"{file}: not a corpus format (known: {', '.join(_READERS)}, each also {', '.join(COMPRESSIONS)})"
            )
        if source.documents == "file" and _format(file) != ".txt":
            raise CorpusError(f"{file}: documents: file is for .txt; here every record is a document")
    return files


def read_documents(source: TextSource) -> Iterator[str]:
    """Yield the documents of a source in order; whitespace-only ones too, so that the caller can count them.

    Raises:
        CorpusError: a file or line cannot be read; the message names file:line.
    """
    if source.dataset is not None:
        yield from _read_hub(source)
        return
    for file in source_files(source):
        try:
            if source.documents == "file":
                yield _whole_text(file)
            else:
                yield from _READERS[_format(file)](file, source.text_field)
        except _DAMAGED as error:
            raise CorpusError(f"{file}: cannot be read ({error or type(error).__name__})") from None


def _format(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _open(file: Path) -> IO[bytes]:
    if file.suffix in COMPRESSIONS and file.stat().st_size == 0:
        raise EOFError("an empty file is not a compressed one")  # gzip takes it for one without text
    if file.suffix == ".zst":
        # Arrow's reader says that a stream was cut off; zstandard's ends there as if it were whole.
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file)), "zstd"))
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    return opener(file, "rb")


def _decoded_lines(file: Path) -> Iterator[tuple[int, str]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")  # Windows puts a mark before line 1
            except UnicodeDecodeError as error:
                raise CorpusError(f"{file}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _whole_text(file: Path) -> str:
    return "".join(line for _, line in _decoded_lines(file)).rstrip("\r\n")


def _read_txt(file: Path, text_field: str) -> Iterator[str]:
    del text_field  # a text file has no fields
    lines: list[str] = []
    for _, line in _decoded_lines(file):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines).rstrip("\r\n")
            lines = []
    if lines:
        yield "".join(lines).rstrip("\r\n")


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    for number, line in _decoded_lines(file):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{file}:{number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
            raise CorpusError(f"{file}:{number}: no text in a field {text_field!r}")
        try:
            record[text_field].encode()
        except UnicodeEncodeError:  # JSON can say "\ud800", no tokenizer can
            raise CorpusError(f"{file}:{number}: half a surrogate pair in the field {text_field!r}") from None
        yield record[text_field]


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    with _open(file) as stream:
        # A parquet file is read from its end, where a decompressor cannot jump.
        table = pa.parquet.ParquetFile(io.BytesIO(stream.read()) if file.suffix in COMPRESSIONS else stream)
        if text_field not in table.schema_arrow.names:
            raise CorpusError(f"{file}: no column {text_field!r} (it has: {', '.join(table.schema_arrow.names)})")
        number = 0
        for batch in table.iter_batches(columns=[text_field]):
            try:
                texts = batch.column(0).to_pylist()
            except UnicodeDecodeError as error:
                rows = f"one of the rows {number + 1} to {number + len(batch)}"
                raise CorpusError(f"{file}: {rows}: not UTF-8 ({error.reason})") from None
            for text in texts:
                number += 1
                if not isinstance(text, str):
                    raise CorpusError(f"{file}: row {number}: no text in the column {text_field!r}")
                yield text


@contextmanager
def _named_dataset_errors(source: TextSource) -> Iterator[None]:
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorpusError(f"{source.name}: the dataset {source.dataset} cannot be loaded: {message}") from None


def dataset_commit(source: TextSource) -> str:
    """Return what names the content of a hub dataset: the commit its revision stands for, by datasets' own look-up.

    Raises:
        CorpusError: it cannot be found out.
    """
    import datasets  # takes seconds, and only hub sources need it

    with _named_dataset_errors(source):
        builder = datasets.load_dataset_builder(source.dataset, source.subset, revision=source.revision)
    return str(builder.hash)


def _read_hub(source: TextSource) -> Iterator[str]:
    import datasets

    with _named_dataset_errors(source):
        rows = datasets.load_dataset(
            source.dataset, source.subset, split=source.split, revision=source.revision, streaming=True
        )
        for number, row in enumerate(rows, start=1):
            text = row.get(source.text_field)
            if not isinstance(text, str):
                place = f"{source.name}: {source.dataset} row {number}"
                raise CorpusError(f"{place}: no text in a field {source.text_field!r}")
            yield text


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
