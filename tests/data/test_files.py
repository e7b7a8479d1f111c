"""Where text lies: lists of patterns, and stores that fsspec reads."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scale_cli.config.sources import TextSource
from scale_cli.data.documents import CorpusReader, Document, check_source
from scale_cli.data.files import SourceFile, SourceHashes, source_files
from scale_cli.errors import CorpusError
from tests.data.corpus_files import COMPRESSORS, DOCUMENTS, FORMATS, LIMIT, compressions, formats

BUCKET = "s3://bucket"


class Store(MemoryFileSystem):  # type: ignore[misc] # fsspec is not annotated
    """A store in memory."""

    protocol = "s3"
    store: dict[str, Any] = {}  # noqa: RUF012 # as its base declares it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("s3://", "memory://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"s3:/{name}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "s3", Store)
    yield Store()
    Store.store.clear()


def source(path: str | list[str], **options: Any) -> TextSource:
    return TextSource(name="source", path=path, language="ko", **options)


def texts(of: TextSource) -> list[str]:
    return [record.text for record in CorpusReader(of, LIMIT) if isinstance(record, Document)]


@formats
@compressions
def test_a_store_gives_what_the_same_file_here_gives(form: str, compression: str, store: Store) -> None:
    store.pipe(f"{BUCKET}/a/x{form}{compression}", COMPRESSORS[compression](FORMATS[form](DOCUMENTS)))
    assert texts(source(f"{BUCKET}/**/*{form}{compression}")) == DOCUMENTS
    check_source(source(f"{BUCKET}/a/x{form}{compression}"))


def test_patterns_are_read_in_their_order_and_no_file_twice(tmp_path: Path, store: Store) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"of {name}")
    store.pipe(f"{BUCKET}/d.txt", b"of d")
    several = source([str(tmp_path / "c.txt"), f"{BUCKET}/d.txt", str(tmp_path / "*.txt")])
    assert texts(several) == ["of c", "of d", "of a", "of b"]


def test_what_names_the_content_of_a_file_in_a_store_changes_with_it(tmp_path: Path, store: Store) -> None:
    def content() -> str:
        (file,) = source_files(source(f"{BUCKET}/x.txt"))
        return file.content(SourceHashes(tmp_path))

    store.pipe(f"{BUCKET}/x.txt", b"one")
    before = content()
    assert content() == before
    store.pipe(f"{BUCKET}/x.txt", b"two")
    assert content() != before


@pytest.mark.parametrize("pattern", [f"{BUCKET}/*.txt", f"{BUCKET}/x.txt", "/nowhere/*.txt"])
def test_a_pattern_among_several_that_matches_nothing_is_named(pattern: str, tmp_path: Path, store: Store) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(CorpusError, match="source: no file matches") as caught:
        check_source(source([str(tmp_path / "x.txt"), pattern]))
    assert pattern in str(caught.value)


def test_a_store_is_asked_once_for_all_files_of_a_pattern(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        store.pipe(f"{BUCKET}/{number}.txt", b"text")
    asked, info = [], Store.info

    def noted(self: Store, path: str, **given: Any) -> Any:
        asked.append(path)
        return info(self, path, **given)

    monkeypatch.setattr(Store, "info", noted)
    files = source_files(source(f"{BUCKET}/*.txt"))
    assert [file.size for file in files] == [4] * 9
    assert not any(path.endswith(".txt") for path in asked)


def test_a_server_that_tells_no_size_is_refused_in_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe(f"{BUCKET}/x.txt", b"text")
    monkeypatch.setattr(Store, "info", lambda _, path, **__: {"name": path, "size": None, "type": "file"})
    with pytest.raises(CorpusError, match=r"^source: s3://bucket/x\.txt cannot be read \(.*tells no size.*\)$"):
        check_source(source(f"{BUCKET}/x.txt"))


def test_a_store_that_fails_ends_the_reading_in_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe(f"{BUCKET}/x.jsonl", FORMATS[".jsonl"](DOCUMENTS))

    def fails(*_: object, **__: object) -> None:
        raise TimeoutError("no answer\nafter 60 s")

    monkeypatch.setattr(Store, "open", fails)
    with pytest.raises(CorpusError, match=r"s3://bucket/x\.jsonl cannot be read \(no answer after 60 s\)$"):
        texts(source(f"{BUCKET}/x.jsonl"))


def test_a_store_whose_library_is_not_installed_is_told_in_one_line() -> None:
    with pytest.raises(CorpusError, match=r"source: gs://bucket/x\.txt cannot be read \(.*gcsfs.*\)$"):
        check_source(source("gs://bucket/x.txt"))


@pytest.mark.parametrize(
    "path",
    ["ftp://host/x.txt", "file:///x.txt", "s3://user:hunter2@bucket/x.txt", "zip://x.txt::s3://bucket/x.zip"],
)
def test_other_urls_and_those_with_a_password_are_refused_and_not_repeated(path: str) -> None:
    with pytest.raises(ValidationError, match="is a URL") as caught:
        source(path)
    assert "hunter2" not in " ".join(error["msg"] for error in caught.value.errors())


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30), max_size=8))
def test_csv_and_json_give_the_texts_that_were_written(tmp_path_factory: Any, written: list[str]) -> None:
    folder = tmp_path_factory.mktemp("written")
    wanted = [text for text in written if text.strip()]
    table = io.StringIO(newline="")
    writer = csv.writer(table, quoting=csv.QUOTE_ALL)
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(written))])
    (folder / "x.csv").write_text(table.getvalue(), encoding="utf-8", newline="")
    (folder / "x.json").write_text(json.dumps([{"text": text} for text in written]))
    for name in ("x.csv", "x.json"):
        assert texts(source(str(folder / name))) == wanted


def test_a_file_names_its_format_and_its_compression() -> None:
    named = {name: SourceFile(name) for name in ("a.b.jsonl.gz", "s3://x/y.csv", "z.txt.xz", "w")}
    parts = {name: (file.format, file.compression) for name, file in named.items()}
    assert parts == {
        "a.b.jsonl.gz": (".jsonl", ".gz"),
        "s3://x/y.csv": (".csv", ""),
        "z.txt.xz": (".txt", ".xz"),
        "w": ("", ""),
    }


@pytest.mark.parametrize(
    ("path", "said"), [("", "is empty"), ([], "is an empty list"), (["x.txt", "ftp://h/x"], "URL")]
)
def test_a_bad_pattern_is_one_error(path: str | list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        source(path)
    assert caught.value.error_count() == 1
