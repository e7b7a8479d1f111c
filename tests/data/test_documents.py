from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.schema import TextSource
from scale_cli.data.documents import read_documents
from scale_cli.errors import CorpusError

DOCUMENTS = ["The first.\nIts second line, 한국어.", "둘째 문서", "  indented and trailing  \n\tthird"]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def plain(content: bytes) -> bytes:
    return content


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": plain,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def as_txt(documents: list[str]) -> bytes:
    return "\n\n".join(documents).encode()


def as_jsonl(documents: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)).encode()


def as_parquet(documents: list[str], field: str = "text") -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"id": range(len(documents)), field: documents}), sink)
    return sink.getvalue()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {".txt": as_txt, ".jsonl": as_jsonl, ".parquet": as_parquet}

formats = pytest.mark.parametrize("form", FORMATS)
compressions = pytest.mark.parametrize("compression", COMPRESSORS)
compressed = pytest.mark.parametrize("compression", [c for c in COMPRESSORS if c])


def read(path: Path | str, text_field: str = "text") -> list[str]:
    return list(read_documents(TextSource(name="source", path=str(path), language="ko", text_field=text_field)))


def error_of(path: Path | str, text_field: str = "text") -> str:
    with pytest.raises(CorpusError) as caught:
        read(path, text_field)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What is read


@formats
@compressions
def test_every_format_and_compression_gives_the_same_documents(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    file.write_bytes(COMPRESSORS[compression](FORMATS[form](DOCUMENTS)))
    assert read(file) == DOCUMENTS


@compressed
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path: Path, compression: str) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    file.write_bytes(b"".join(COMPRESSORS[compression](as_jsonl([text])) for text in DOCUMENTS))
    assert read(file) == DOCUMENTS


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("blank", ["", " ", "\t \t", "\u3000"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_blank_lines_part_documents(tmp_path: Path, newline: str, blank: str, number: int) -> None:
    file = tmp_path / "corpus.txt"
    gap = (blank + newline) * number
    lines = [gap, f"one{newline}more{newline}", gap, f"two{newline}", gap, "three"]
    file.write_bytes("".join(lines).encode())
    assert read(file) == [f"one{newline}more", "two", "three"]


LINES = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=5)


@settings(deadline=None, max_examples=100)
@given(st.lists(LINES, max_size=10), st.booleans())
def test_no_line_with_text_is_lost_or_joined_across_a_blank_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends_in_newline: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "lines.txt"
    file.write_bytes(("\n".join(lines) + "\n" * ends_in_newline).encode())
    documents = [document.split("\n") for document in read(file)]
    if lines and lines[0].startswith("\ufeff"):
        lines = [lines[0].removeprefix("\ufeff"), *lines[1:]]
    assert [line for document in documents for line in document] == [line for line in lines if line.strip()]
    assert all(document for document in documents)
    starts = [i for i, line in enumerate(lines) if line.strip() and (i == 0 or not lines[i - 1].strip())]
    assert len(documents) == len(starts)


@pytest.mark.parametrize("form", [".txt", ".jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes(b"\xef\xbb\xbf" + FORMATS[form](DOCUMENTS))
    assert read(file) == DOCUMENTS


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_the_text_field_is_the_one_that_is_named(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes({".jsonl": as_jsonl, ".parquet": as_parquet}[form](DOCUMENTS, "body"))
    assert read(file, "body") == DOCUMENTS
    assert "'text'" in error_of(file)


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_empty_documents_are_passed_on_to_be_counted(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes(FORMATS[form](["", "a", " \n"]))
    assert read(file) == ["", "a", " \n"]


def test_the_files_of_a_glob_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "c/d.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = as_jsonl([name]) if "jsonl" in name else name.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(tmp_path / "**/*.*") == ["a.txt", "b.jsonl", "c/d.txt.gz"]


@pytest.mark.parametrize("name", ["a::b.txt", "news.2024.txt", "한글.txt", "with space.txt"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(as_txt(DOCUMENTS))
    assert read(tmp_path / name) == DOCUMENTS


@compressions
def test_a_file_may_be_one_document(tmp_path: Path, compression: str) -> None:
    text = "\n" + "\n\n".join(DOCUMENTS)
    for name, newline in (("a", ""), ("b", "\n")):
        content = (text + newline).encode("utf-8-sig")
        (tmp_path / f"{name}.txt{compression}").write_bytes(COMPRESSORS[compression](content))
    path = str(tmp_path / f"*.txt{compression}")
    source = TextSource(name="source", path=path, language="ko", documents="file")
    assert list(read_documents(source)) == [text, text]


# What cannot be read


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_a_file_of_records_is_not_one_document(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes(FORMATS[form](DOCUMENTS))
    source = TextSource(name="source", path=str(file), language="ko", documents="file")
    with pytest.raises(CorpusError, match=r"documents: file is for \.txt") as caught:
        next(read_documents(source))
    assert str(file) in str(caught.value)


@compressions
@pytest.mark.parametrize("form", [".txt", ".jsonl"])
def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    lines = [b'{"text": "fine"}\n', b'{"text": "also"}\n', b'{"text": "caf\xe9"}\n', b'{"text": "fine"}\n']
    file.write_bytes(COMPRESSORS[compression](b"".join(lines)))
    assert error_of(file).startswith(f"{file}:3: not UTF-8")


@compressions
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "'text'"),
        (b'"text"', "'text'"),
        (b'{"body": "a"}', "'text'"),
        (b'{"text": null}', "'text'"),
        (b'{"text": ["a"]}', "'text'"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
    ids=lambda value: value[:20].decode() if isinstance(value, bytes) else None,
)
def test_a_line_that_holds_no_document_is_named(tmp_path: Path, line: bytes, problem: str, compression: str) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    file.write_bytes(COMPRESSORS[compression](as_jsonl(["a", "b"]) + line + b"\n" + as_jsonl(["c"])))
    message = error_of(file)
    assert message.startswith(f"{file}:3: ")
    assert problem in message


def test_documents_before_a_bad_line_are_given_first(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(as_jsonl(["a", "b"]) + b"{")
    documents = read_documents(TextSource(name="source", path=str(file), language="ko"))
    assert [next(documents), next(documents)] == ["a", "b"]
    with pytest.raises(CorpusError):
        next(documents)


@formats
@compressed
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.99])
def test_a_cut_off_compressed_file_is_an_error_that_names_it(
    tmp_path: Path, form: str, compression: str, kept: float
) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    whole = COMPRESSORS[compression](FORMATS[form]([f"document {i * i}" for i in range(999)]))
    file.write_bytes(whole[: int(kept * len(whole))])
    assert str(file) in error_of(file)


@formats
@compressed
def test_a_file_that_is_not_what_its_suffix_says_is_named(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    file.write_bytes(as_txt(DOCUMENTS))
    assert str(file) in error_of(file)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, kept: float) -> None:
    file = tmp_path / "corpus.parquet"
    whole = as_parquet(DOCUMENTS)
    file.write_bytes(whole[: int(kept * len(whole))])
    assert str(file) in error_of(file)


def test_a_parquet_row_without_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    pa.parquet.write_table(pa.table({"text": ["a", None]}), file)
    assert error_of(file).startswith(f"{file}: row 2: ")


def test_a_parquet_column_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    offsets, data = pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")
    pa.parquet.write_table(pa.table({"text": pa.StringArray.from_buffers(1, offsets, data)}), file)
    message = error_of(file)
    assert str(file) in message
    assert "not UTF-8" in message


def test_a_missing_parquet_column_comes_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    file.write_bytes(as_parquet(DOCUMENTS, "body"))
    message = error_of(file)
    assert "'text'" in message
    assert "id, body" in message


def test_a_glob_that_matches_no_file_names_source_and_glob(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    message = error_of(tmp_path / "*.txt")
    assert "source" in message
    assert str(tmp_path / "*.txt") in message


@pytest.mark.parametrize("name", ["corpus.md", "corpus", "corpus.gz", "corpus.txt.bz2", "corpus.json"])
def test_an_unknown_suffix_is_named_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text")
    (tmp_path / "a.txt").write_bytes(b"first")
    with pytest.raises(CorpusError) as caught:
        next(read_documents(TextSource(name="source", path=str(tmp_path / "*"), language="ko")))
    assert str(tmp_path / name) in str(caught.value)
    assert ".jsonl" in str(caught.value)


# Datasets: a local folder goes the way of a hub id


def dataset(folder: Path, text_field: str = "text", split: str = "train") -> TextSource:
    return TextSource(name="source", dataset=str(folder), language="ko", text_field=text_field, split=split)


def test_a_dataset_gives_its_documents_in_order(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "test.jsonl").write_bytes(as_jsonl(["held out"]))
    assert list(read_documents(dataset(tmp_path))) == DOCUMENTS
    assert list(read_documents(dataset(tmp_path, split="test"))) == ["held out"]


@pytest.mark.parametrize(
    ("content", "source", "named"),
    [
        (None, {}, "folder"),
        (b'{"text": "a"}\n', {"split": "nosuch"}, "nosuch"),
        (b'{"text": "a"}\n', {"text_field": "body"}, "row 1"),
        (b'{"text": "a"}\n{"text": "\n', {}, "folder"),
    ],
    ids=["no folder", "no such split", "no such field", "damaged"],
)
def test_a_dataset_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, source: dict[str, str], named: str
) -> None:
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        list(read_documents(dataset(folder, **source)))
    message = str(caught.value)
    assert message.startswith("source: ")
    assert named in message
    assert "\n" not in message
