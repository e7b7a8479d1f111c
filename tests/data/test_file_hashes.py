from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from scale_cli.data import files
from scale_cli.data.files import SourceHashes
from scale_cli.storage.atomic import file_sha256

_AN_HOUR_NS = 3600 * 10**9


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that were read through, in a world an hour after every file was made."""
    read: list[Path] = []

    def sha256(path: Path) -> str:
        read.append(path)
        return file_sha256(path)

    monkeypatch.setattr(files, "file_sha256", sha256)
    monkeypatch.setattr(files, "_LEAST_BYTES", 4)
    later = time.time_ns() + _AN_HOUR_NS
    monkeypatch.setattr(time, "time_ns", lambda: later)
    return read


def opened(file: Path) -> str:
    hashes = SourceHashes(file.parent / "cache")
    sha256 = hashes.sha256(file)
    hashes.remember()
    return sha256


def source(tmp_path: Path, text: str = "a large corpus") -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_source_is_read_through_once(tmp_path: Path, hashed: list[Path]) -> None:
    file = source(tmp_path)
    assert [opened(file) for _ in range(3)] == [file_sha256(file)] * 3
    assert hashed == [file]


@pytest.mark.parametrize("how", ["in place", "replaced", "longer", "touched"])
def test_a_source_that_has_changed_is_read_again_even_where_its_time_of_writing_was_put_back(
    tmp_path: Path, hashed: list[Path], how: str
) -> None:
    file = source(tmp_path)
    opened(file)
    status = file.stat()
    if how == "replaced":
        file.rename(tmp_path / "kept")
    if how != "touched":
        source(tmp_path, "b large corpus, longer" if how == "longer" else "b large corpus")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert opened(file) == file_sha256(file)
    assert hashed == [file] * 2


def test_what_has_changed_just_now_or_is_small_is_not_remembered(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, small = source(tmp_path), tmp_path / "small.txt"
    small.write_bytes(b"abc")
    monkeypatch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns + 10**6)
    for _ in range(2):
        opened(file)
        opened(small)
    assert hashed == [file, small] * 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("record", ["{", "[]", "null", "all null", "of text"])
def test_a_damaged_record_is_none(tmp_path: Path, hashed: list[Path], record: str) -> None:
    file = source(tmp_path)
    opened(file)
    damaged = {"all null": json.dumps({str(file): None}), "of text": json.dumps({str(file): {"sha256": "0"}})}
    (tmp_path / "cache" / ".sources.json").write_text(damaged.get(record, record), encoding="utf-8")
    assert opened(file) == file_sha256(file)
    assert hashed == [file] * 2


def test_a_record_that_cannot_be_written_is_no_error(tmp_path: Path, hashed: list[Path]) -> None:
    file = source(tmp_path)
    (tmp_path / "cache").write_bytes(b"a file in the way")
    assert [opened(file) for _ in range(2)] == [file_sha256(file)] * 2
    assert hashed == [file] * 2
