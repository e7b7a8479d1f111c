from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.sources import TextSource
from scale_cli.data.documents import CorpusReader, Reason
from scale_cli.errors import CorpusError
from tests.data.corpus_files import (
    COMPRESSORS,
    DOCUMENTS,
    FORMATS,
    LIMIT,
    as_jsonl,
    as_parquet,
    as_txt,
    compressed,
    compressions,
    dropped,
    formats,
    kept,
    read,
    records,
)

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


@compressions
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_may_be_one_document(tmp_path: Path, compression: str, end: str) -> None:
    lines = ["\ufeff첫 문장", "", "  둘째 ", "third\u2028still", ""]
    (tmp_path / f"a.txt{compression}").write_bytes(COMPRESSORS[compression](end.join(lines).encode()))
    path = str(tmp_path / f"*.txt{compression}")
    assert read(path, documents="line") == ["첫 문장", "  둘째 ", "third\u2028still"]


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
