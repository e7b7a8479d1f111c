from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.schema import TextSource
from scale_cli.data.documents import CorpusReader, Document, Dropped, Reason, Record
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


LIMIT = 10_000_000


def records(path: Path | str, limit: int = LIMIT, **options: Any) -> list[Record]:
    return list(CorpusReader(TextSource(name="source", path=str(path), language="ko", **options), limit))


def read(path: Path | str, **options: Any) -> list[str]:
    """The documents of a source in which nothing is bad."""
    found = records(path, **options)
    assert not [record for record in found if isinstance(record, Dropped)]
    return [record.text for record in found if isinstance(record, Document)]


def kept(found: list[Record]) -> list[str]:
    return [record.text for record in found if isinstance(record, Document)]


def dropped(found: list[Record]) -> list[tuple[Reason, str]]:
    return [(record.reason, record.place) for record in found if isinstance(record, Dropped)]


def error_of(path: Path | str) -> str:
    with pytest.raises(CorpusError) as caught:
        records(path)
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


@compressed
@pytest.mark.parametrize("after", ["damaged part", "something else"])
def test_what_follows_a_compressed_part_is_not_passed_over(tmp_path: Path, compression: str, after: str) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    part = COMPRESSORS[compression](as_jsonl(DOCUMENTS))
    file.write_bytes(part + (part[:12] + b"xx" + part[12:] if after == "damaged part" else b"something else"))
    found = records(file)
    assert kept(found) in ([], DOCUMENTS)  # what was decompressed together with the damage is lost
    assert [reason for reason, _ in dropped(found)] == [Reason.DAMAGED_FILE]


def test_zeros_may_pad_the_parts_of_an_xz_file(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.xz"
    file.write_bytes(b"\0\0\0\0".join(lzma.compress(as_jsonl([text])) for text in DOCUMENTS) + bytes(100_000))
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


LINES = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=5)


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
    assert read(file, text_field="body") == DOCUMENTS


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
    assert read(path, documents="file") == [text, text]


# What is bad is passed over, with its reason and place


@compressions
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", Reason.NOT_JSON),
        (b"", Reason.EMPTY),
        (b" \t", Reason.EMPTY),
        (b'{"text": "a"} {"text": "b"}', Reason.NOT_JSON),
        (b"[" * 100_000, Reason.NOT_JSON),
        (b"[]", Reason.NO_FIELD),
        (b'"text"', Reason.NO_FIELD),
        (b'{"body": "a"}', Reason.NO_FIELD),
        (b'{"text": null}', Reason.WRONG_TYPE),
        (b'{"text": ["a"]}', Reason.WRONG_TYPE),
        (b'{"text": 7}', Reason.WRONG_TYPE),
        (b'{"text": ""}', Reason.EMPTY),
        (b'{"text": " \\n"}', Reason.EMPTY),
        (b'{"text": "caf\xe9"}', Reason.NOT_UTF8),
        (b'{"text": "\\ud800"}', Reason.NOT_UTF8),
        (b'{"text": "a\\u0000b"}', Reason.NUL),
        (b"\0" * 100, Reason.NUL),
        (b'{"text": "' + b"a" * 1001 + b'"}', Reason.TOO_LARGE),
        (b'{"id": "' + b"a" * 20_000 + b'", "text": "b"}', Reason.TOO_LARGE),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_bad_line_of_json_costs_itself_alone(tmp_path: Path, line: bytes, reason: Reason, compression: str) -> None:
    file = tmp_path / f"corpus.jsonl{compression}"
    file.write_bytes(COMPRESSORS[compression](as_jsonl(["a", "b"]) + line + b"\n" + as_jsonl(["c"])))
    # Nesting so deep is not JSON to Python's parser whatever its length; it must be read to be refused.
    found = records(file, limit=100_000 if line.startswith(b"[[") else 1000)
    assert kept(found) == ["a", "b", "c"]
    assert dropped(found) == [(reason, f"{file}:3")]


@compressions
@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"caf\xe9", Reason.NOT_UTF8), (b"a\0b", Reason.NUL), (b"a" * 1003, Reason.TOO_LARGE)],
    ids=["not UTF-8", "NUL", "too large"],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_bad_line_of_text_costs_its_paragraph(
    tmp_path: Path, line: bytes, reason: Reason, end: bytes, compression: str
) -> None:
    file = tmp_path / f"corpus.txt{compression}"
    lines = [b"one", b"", b"two", line, b"also two", b"", b"three"]
    file.write_bytes(COMPRESSORS[compression](end.join(lines)))
    found = records(file, limit=1000)
    assert kept(found) == ["one", "three"]
    assert dropped(found) == [(reason, f"{file}:4")]
    assert found[1].num_bytes == len(end.join([b"two", line, b"also two", b""]))
    assert dropped(records(file, limit=1000, documents="file")) == [(reason, f"{file}:4")]


@formats
@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("limit", [6, 50, 1000])
def test_a_document_may_be_as_large_as_the_limit_and_no_larger(
    tmp_path: Path, form: str, limit: int, over: int
) -> None:
    file = tmp_path / f"corpus{form}"
    text = "한" * ((limit + over) // 3) + "x" * ((limit + over) % 3)
    file.write_bytes(FORMATS[form]([text, "a"]))
    found = records(file, limit=limit)
    assert kept(found) == ([] if over else [text]) + ["a"]
    assert [reason for reason, _ in dropped(found)] == [Reason.TOO_LARGE] * over


def test_a_paragraph_of_many_lines_is_not_held_beyond_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"one\n\n" + b"0123456789\n" * 1000 + b"\nthree\n")
    found = records(file, limit=100)
    assert kept(found) == ["one", "three"]
    assert dropped(found) == [(Reason.TOO_LARGE, f"{file}:12")]
    assert found[1].num_bytes == 11_000


@formats
@compressed
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.99])
def test_of_a_cut_off_compressed_file_what_came_before_is_kept(
    tmp_path: Path, form: str, compression: str, part: float
) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    documents = [f"document {i * i}" for i in range(999)]
    whole = COMPRESSORS[compression](FORMATS[form](documents))
    file.write_bytes(whole[: int(part * len(whole))])
    (tmp_path / f"later{form}").write_bytes(FORMATS[form](["of the next file"]))
    *found, damage, last = records(tmp_path / "*")
    assert kept(found) == documents[: len(found)]
    if part > 0.9 and compression == ".gz" and form != ".parquet":  # the others compress all of it as one block
        assert found
    assert kept([last]) == ["of the next file"]
    assert isinstance(damage, Dropped)
    assert damage.reason == Reason.DAMAGED_FILE
    assert damage.place.startswith(f"{file} (")


@formats
@compressed
def test_a_file_that_is_not_what_its_suffix_says_is_damaged(tmp_path: Path, form: str, compression: str) -> None:
    file = tmp_path / f"corpus{form}{compression}"
    file.write_bytes(as_txt(DOCUMENTS))
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert str(file) in place


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_cut_off_parquet_file_is_damaged(tmp_path: Path, part: float) -> None:
    file = tmp_path / "corpus.parquet"
    whole = as_parquet(DOCUMENTS)
    file.write_bytes(whole[: int(part * len(whole))])
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert str(file) in place


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(None, Reason.WRONG_TYPE), ("", Reason.EMPTY), ("a\0", Reason.NUL), ("a" * 1001, Reason.TOO_LARGE)],
)
def test_a_bad_parquet_row_costs_itself_alone(tmp_path: Path, bad: str | None, reason: Reason) -> None:
    file = tmp_path / "corpus.parquet"
    pa.parquet.write_table(pa.table({"text": ["a", bad, "c"]}), file)
    found = records(file, limit=1000)
    assert kept(found) == ["a", "c"]
    assert dropped(found) == [(reason, f"{file}: row 2")]


def test_a_parquet_column_of_another_type_is_bad_row_by_row(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    pa.parquet.write_table(pa.table({"text": [1, 2]}), file)
    assert [reason for reason, _ in dropped(records(file))] == [Reason.WRONG_TYPE] * 2


def test_a_parquet_row_that_is_not_utf8_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    offsets, data = pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"\xff\xfea")
    pa.parquet.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, data)}), file)
    found = records(file)
    assert kept(found) == ["a"]
    assert dropped(found) == [(Reason.NOT_UTF8, f"{file}: row 1")]
    assert found[0].num_bytes == 2


def test_a_missing_parquet_column_comes_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "corpus.parquet"
    file.write_bytes(as_parquet(DOCUMENTS, "body"))
    [(reason, place)] = dropped(records(file))
    assert reason == Reason.DAMAGED_FILE
    assert "'text'" in place
    assert "id, body" in place


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_on_documents_counts_good_and_bad(tmp_path: Path, limit: int) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(as_jsonl(["a"]) + b"{\n" + as_jsonl(["c", "d"]))
    found = records(file, max_documents=limit)
    assert len(found) == min(limit, 4)
    assert kept(found) == ["a", "c", "d"][: max(1, limit - 1)]


def test_the_position_ends_at_the_end_of_the_last_file(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz"):
        content = as_txt(DOCUMENTS * 99)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    reader = CorpusReader(TextSource(name="source", path=str(tmp_path / "*"), language="ko"), LIMIT)
    positions = [reader.position_bytes for _ in reader]
    assert positions == sorted(positions)
    assert reader.position_bytes == reader.total_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


# What cannot be read


@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_a_file_of_records_is_not_one_document(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"corpus{form}"
    file.write_bytes(FORMATS[form](DOCUMENTS))
    with pytest.raises(CorpusError, match=r"documents: file is for \.txt") as caught:
        records(file, documents="file")
    assert str(file) in str(caught.value)


def test_a_glob_that_matches_no_file_names_source_and_glob(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    message = error_of(tmp_path / "*")
    assert "source" in message
    assert str(tmp_path / "*") in message


@pytest.mark.parametrize("name", ["corpus.md", "corpus", "corpus.gz", "corpus.txt.bz2", "corpus.json"])
def test_an_unknown_suffix_is_named_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text")
    (tmp_path / "a.txt").write_bytes(b"first")
    with pytest.raises(CorpusError) as caught:
        CorpusReader(TextSource(name="source", path=str(tmp_path / "*"), language="ko"), LIMIT)
    assert str(tmp_path / name) in str(caught.value)
    assert ".jsonl" in str(caught.value)


# Datasets: a local folder goes the way of a hub id


def dataset(folder: Path, text_field: str = "text", split: str = "train") -> TextSource:
    return TextSource(name="source", dataset=str(folder), language="ko", text_field=text_field, split=split)


def test_a_dataset_gives_its_documents_in_order(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "test.jsonl").write_bytes(as_jsonl(["held out"]))
    assert kept(list(CorpusReader(dataset(tmp_path), LIMIT))) == DOCUMENTS
    assert kept(list(CorpusReader(dataset(tmp_path, split="test"), LIMIT))) == ["held out"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"body": "a"}', Reason.NO_FIELD),
        ('{"text": null}', Reason.WRONG_TYPE),
        ('{"text": ""}', Reason.EMPTY),
        ('{"text": "a\\u0000"}', Reason.NUL),
    ],
)
def test_a_bad_row_of_a_dataset_has_a_reason_and_a_place(tmp_path: Path, line: str, reason: Reason) -> None:
    (tmp_path / "train.jsonl").write_text(line + "\n")
    found = list(CorpusReader(dataset(tmp_path), LIMIT))
    assert dropped(found) == [(reason, f"{tmp_path} row 1")]


@pytest.mark.parametrize(
    ("content", "source", "named"),
    [
        (None, {}, "folder"),
        (b'{"text": "a"}\n', {"split": "nosuch"}, "nosuch"),
        (b'{"text": "a"}\n{"text": "\n', {}, "folder"),
    ],
    ids=["no folder", "no such split", "damaged"],
)
def test_a_dataset_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, source: dict[str, str], named: str
) -> None:
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        list(CorpusReader(dataset(folder, **source), LIMIT))
    message = str(caught.value)
    assert message.startswith("source: ")
    assert named in message
    assert "\n" not in message
