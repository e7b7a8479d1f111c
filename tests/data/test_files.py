"""Where text lies: lists of patterns, stores that fsspec reads, what is refused, and hashes that
are remembered.
"""

import glob
import json
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import ValidationError

from scale_cli.data import files
from scale_cli.data.files import SourceFile, check_source, content_hashes, source_files
from scale_cli.errors import CorpusError
from scale_cli.storage.atomic import file_sha256, read_json
from tests.data.corpus_files import (
    COMPRESSORS,
    DOCUMENTS,
    FORMATS,
    read,
    source_of,
)

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


def test_a_store_gives_what_the_same_file_here_gives(store: Store) -> None:
    for form, compression in ((".jsonl", ".gz"), (".txt", ".zst"), (".parquet", "")):
        store.pipe(
            f"{BUCKET}/a/x{form}{compression}", COMPRESSORS[compression](FORMATS[form](DOCUMENTS))
        )
        assert read(f"{BUCKET}/**/*{form}{compression}") == DOCUMENTS
        check_source(source_of(f"{BUCKET}/a/x{form}{compression}"))


def test_patterns_are_read_in_their_order_and_no_file_twice(tmp_path: Path, store: Store) -> None:
    for name in ("b", "a", "c::한글 2024"):
        (tmp_path / f"{name}.txt").write_text(f"of {name}")
    store.pipe(f"{BUCKET}/d.txt", b"of d")
    several = [str(tmp_path / "c*.txt"), f"{BUCKET}/d.txt", str(tmp_path / "*.txt")]
    assert read(several) == ["of c::한글 2024", "of d", "of a", "of b"]


def test_two_stars_stand_for_any_number_of_folders_and_for_none(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "sub/deep/sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    for pattern in ("**/*.txt", "**/sub/*.txt", "sub/**/*.txt", "**/deep/**/*.txt", "**/a.txt"):
        expected = sorted(glob.glob(pattern, root_dir=tmp_path, recursive=True))
        assert read(tmp_path / pattern) == expected


def test_a_path_that_exists_is_that_path(tmp_path: Path) -> None:
    (tmp_path / "data [1]").mkdir()
    for name in ("part[1].txt", "part1.txt", "data [1]/a.txt", "data [1]/b[*].md"):
        (tmp_path / name).write_text(f"of {name}")
    assert read(tmp_path / "part[1].txt") == ["of part[1].txt"]
    assert read(tmp_path / "part[12].txt") == ["of part1.txt"]
    assert read(tmp_path / "data [1]/*.txt") == ["of data [1]/a.txt"]
    assert read(tmp_path / "data [1]/b[*].md") == ["of data [1]/b[*].md"]


def test_a_file_of_several_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("of a")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "a.txt")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    assert read(tmp_path / "*.txt") == ["of a"]
    names = ["a.txt", "elsewhere/a.txt", "link.txt"]
    assert read([str(tmp_path / name) for name in names]) == ["of a"]


@pytest.mark.parametrize("written", ["NFC", "NFD"])
def test_a_name_is_found_in_either_normal_form(tmp_path: Path, written: Any) -> None:
    (folder := tmp_path / normalize(written, "말뭉치")).mkdir()
    (folder / normalize(written, "한국 é.txt")).write_text("text")
    for form in ("NFC", "NFD"):
        for name in ("말뭉치/한국 é.txt", "말뭉치/한국*", "말*/한국 é.txt"):
            assert read(tmp_path / normalize(form, name)) == ["text"]


def test_a_store_that_fails_ends_the_reading_in_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe(f"{BUCKET}/x.jsonl", FORMATS[".jsonl"](DOCUMENTS))

    def fails(*_: object, **__: object) -> None:
        raise TimeoutError("no answer\nafter 60 s")

    monkeypatch.setattr(Store, "open", fails)
    with pytest.raises(
        CorpusError, match=r"s3://bucket/x\.jsonl cannot be read \(no answer after 60 s\)$"
    ):
        read(f"{BUCKET}/x.jsonl")
    with pytest.raises(
        CorpusError, match=r"source: gs://bucket/x\.txt cannot be read \(.*gcsfs.*\)$"
    ):
        check_source(source_of("gs://bucket/x.txt"))  # whose library is not installed
    monkeypatch.setattr(
        Store, "info", lambda _, path, **__: {"name": path, "size": None, "type": "file"}
    )
    with pytest.raises(
        CorpusError, match=r"^source: s3://bucket/x\.jsonl cannot be read \(.*tells no size.*\)$"
    ):
        check_source(source_of(f"{BUCKET}/x.jsonl"))


# What is refused


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file:///x.txt", "is a URL"),
        ("s3://user:hunter2@bucket/x.txt", "is a URL"),
        ("zip://x.txt::s3://bucket/x.zip", "is a URL"),
        ("", "is empty"),
        ([], "is an empty list"),
        (["x.txt", "ftp://h/x"], "URL"),
    ],
)
def test_a_bad_pattern_is_one_error_that_repeats_no_password(
    path: str | list[str], said: str
) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        source_of(path)
    assert caught.value.error_count() == 1
    assert "hunter2" not in " ".join(error["msg"] for error in caught.value.errors())


TREE = (
    "x",
    "x.gz",
    "x.txt.bz2",
    "x.parquet.gz",
    "x.csv",
    "x.parquet",
    "x.docx",
    "x.pdf",
    "text/a.jsonl.gz",
    "text/x.rst",
    "more/in/a.txt",
)


@pytest.mark.parametrize(
    ("pattern", "options", "told"),
    [
        *(
            (pattern, {}, "source: no file matches {}")
            for pattern in (f"{BUCKET}/*.txt", f"{BUCKET}/x.txt", "/no/*.txt")
        ),
        ("tex*", {}, "source: no file matches {}"),  # a folder that a pattern happens to match
        *((name, {}, "{}: not a corpus format") for name in TREE[:4]),
        ("x.docx", {}, "{}: not a corpus format (known: .txt"),
        ("x.pdf", {}, "{}: not a corpus format (known: .txt"),
        *((name, {"documents": "line"}, "{}: documents: line is") for name in TREE[4:6]),
        *((name, {"messages_field": "m"}, "{}: messages_field") for name in TREE[4:6]),
        ("more/in/a.txt", {"text_field": "body"}, "{}: text_field: body names a column"),
        ("more", {}, "source: {0} is a folder, not a file; give a pattern, such as {0}/**/*.txt"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_is_no_corpus_is_named_before_anything_is_read(
    tmp_path: Path, pattern: str, options: dict[str, Any], told: str
) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"text")
    path = pattern if pattern.startswith((BUCKET, "/")) else f"{tmp_path}/{pattern}"
    with pytest.raises(CorpusError) as caught:
        check_source(source_of(path, **options))
    assert str(caught.value).startswith(told.format(path)) and "\n" not in str(caught.value)
    if path.endswith((".docx", ".pdf")):
        assert "save it as plain text first" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("texts", "is a folder, not a file; give a pattern, such as {}/**/*.txt.xz"),
        ("texts/*.txt", "no file matches {}/*.txt; give {}/*.txt.xz"),
        ("texts/a.txt", "no file matches {}/a.txt"),
    ],
)
def test_a_pattern_that_is_suggested_matches_what_is_there(
    tmp_path: Path, pattern: str, told: str
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt.xz", "b.txt.xz", "c.md", "notes"):
        (folder / name).write_bytes(b"text")
    with pytest.raises(CorpusError) as caught:
        check_source(source_of(str(tmp_path / pattern)))
    assert str(caught.value).endswith(told.format(folder, folder))


# Hashes


def test_what_names_the_content_of_a_file_in_a_store_changes_with_it(
    tmp_path: Path, store: Store
) -> None:
    told = []
    for text in (b"one", None, b"two"):
        if text is not None:
            store.pipe(f"{BUCKET}/x.txt", text)
        told += content_hashes(source_files(source_of(f"{BUCKET}/x.txt")), tmp_path)
    assert told[0] == told[1] != told[2]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that were read through, in a world an hour after every file was made."""
    through: list[Path] = []

    def sha256(path: Path, _moved: object) -> str:
        through.append(path)
        return file_sha256(path)

    monkeypatch.setattr(files, "file_sha256", sha256)
    monkeypatch.setattr(files, "_LEAST_BYTES", 4)
    later = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later)
    return through


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("a large corpus")
    return tmp_path / "corpus.txt"


def check_hash(file: Path) -> None:
    hashes = content_hashes([SourceFile(str(file), file.stat().st_size)], file.parent / "cache")
    assert hashes == [file_sha256(file)]


def test_a_source_is_read_through_again_only_where_it_has_changed_even_where_its_time_was_put_back(
    large: Path, hashed: list[Path]
) -> None:
    status = large.stat()
    for number, text in enumerate(
        ("a large corpus", "b large corpus", "b large corpus, longer", "replaced")
    ):
        if text == "replaced":
            large.rename(large.with_name("kept"))
        large.write_text(text)
        os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))
        check_hash(large)
        check_hash(large)
        assert hashed == [large] * (number + 1)


def test_what_has_changed_just_now_or_is_small_is_not_remembered(
    large: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = large.with_name("small.txt")
    small.write_bytes(b"abc")
    monkeypatch.setattr(time, "time_ns", lambda: large.stat().st_ctime_ns + 10**6)
    for file in (large, small) * 2:
        check_hash(file)
    assert hashed == [large, small] * 2
    assert not (large.parent / "cache").exists()


def test_a_record_that_is_damaged_or_cannot_be_written_is_none(
    large: Path, hashed: list[Path]
) -> None:
    record = large.parent / "cache" / ".sources.json"
    check_hash(large)
    all_null = json.dumps(dict.fromkeys(read_json(record)))
    for damaged in ("{", "[]", "null", all_null):
        record.write_text(damaged)
        check_hash(large)
    record.unlink()
    record.parent.rmdir()
    record.parent.write_bytes(b"a file in the way")
    check_hash(large)
    assert hashed == [large] * 6
