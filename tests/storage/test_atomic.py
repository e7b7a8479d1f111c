"""A folder or a file is as it was or as it shall be; damage is named; one process at a time in a folder."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from scale_cli.errors import StorageError
from scale_cli.storage import atomic
from scale_cli.storage.atomic import (
    MANIFEST,
    changed_versions,
    claimed,
    load_tensors,
    new_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    save_tensors,
    sole_user,
    verify_folder,
    write_json,
)

FILES = {"a.txt": b"first", "deep/er/b.bin": bytes(range(256)), "empty": b""}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != MANIFEST
    }


def write_folder(path: Path, files: dict[str, bytes]) -> None:
    with new_folder(path) as partial:
        fill(partial, files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


def assert_alone_with(folder: Path, files: dict[str, bytes]) -> None:
    """Check that a folder is whole, holds these files, and that nothing stands beside it."""
    verify_folder(folder)
    assert contents(folder) == files
    assert [*folder.parent.iterdir()] == [folder]


# Folders


def test_every_file_of_a_new_folder_has_the_mode_that_the_umask_asks_for(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(folder) as partial:
            fill(partial, FILES)
            save_tensors(partial / "ours.safetensors", {"a": torch.ones(2)})
            save_file({"a": torch.ones(2)}, partial / "theirs.safetensors")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}
    assert len(modes) == len(FILES) + 3
    assert set(modes.values()) == {0o640}


def test_a_folder_is_absent_until_it_is_whole_and_then_replaces_the_previous_one(
    folder: Path,
) -> None:
    for files in (FILES, {"other": b"second"}):
        before = contents(folder)
        for killed in (".folder.partial", ".folder.previous"):  # what a killed writer left
            fill(folder.with_name(killed), {"stale": b"half"})
        with new_folder(folder) as partial:
            fill(partial, files)
            assert contents(folder) == before
        assert_alone_with(folder, files)


def interrupt(_: Path) -> None:
    raise KeyboardInterrupt


def read_from(folder: Path) -> None:
    (folder.parent / "absent").read_bytes()


def copy_to_a_full_disk(folder: Path) -> None:
    raise OSError(
        errno.ENOSPC, "No space left on device", "/elsewhere/source", None, str(folder / "a.txt")
    )


def save_below_nothing(folder: Path) -> None:
    safetensors.torch.save_file({}, folder / "absent" / "a.safetensors")


@pytest.mark.parametrize("before", [{}, {"old": b"content"}])
@pytest.mark.parametrize("act", [interrupt, read_from, copy_to_a_full_disk, save_below_nothing])
def test_what_fails_while_a_folder_is_filled_changes_nothing_and_is_one_line_with_its_name(
    folder: Path, act: Callable[[Path], object], before: dict[str, bytes]
) -> None:
    if before:
        write_folder(folder, before)
    with (
        pytest.raises((StorageError, KeyboardInterrupt)) as failed,
        new_folder(folder) as partial,
    ):
        fill(partial, FILES)
        act(partial)
    told = str(failed.value)
    assert act is interrupt or (told.startswith(str(folder)) and "\n" not in told)
    assert contents(folder) == before
    assert [*folder.parent.iterdir()] == [folder] * bool(before)


def failing(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = 0

    def fail_once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, "no space left")
        return real(*arguments, **options)

    return fail_once


# Synced before the folder takes its place: the manifest and its name, then 4 files, 2 folders, and the folder.
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(os, "fsync", call) for call in range(1, 10)]
    + [(Path, "rename", 1), (Path, "rename", 2), (Path, "replace", 1)],
)
def test_a_disk_that_fails_while_a_folder_is_finished_leaves_the_previous_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    write_folder(folder, {"old": b"content"})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), call))
        with pytest.raises(StorageError, match=r"folder.*no space"):
            write_folder(folder, FILES)
    assert_alone_with(folder, {"old": b"content"})


@pytest.mark.parametrize("clean_up", ["write", "remove_leftovers"])
def test_a_kill_between_the_two_renames_of_a_replacement_is_undone(
    folder: Path, clean_up: str
) -> None:
    write_folder(folder, {"old": b"content"})
    folder.rename(folder.with_name(".folder.previous"))
    fill(folder.with_name(".folder.partial"), FILES)
    if clean_up == "write":
        with pytest.raises(RuntimeError), new_folder(folder):
            raise RuntimeError
    else:
        remove_leftovers(folder.parent)
    assert_alone_with(folder, {"old": b"content"})


def test_a_removed_folder_is_gone_whatever_becomes_of_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(folder, FILES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(os.unlink, 2))
        with pytest.raises(StorageError, match="no space"):
            remove_folder(folder)
    assert not folder.exists()
    folder.with_name(".x.json.partial").write_text("a file that was being written")
    remove_leftovers(folder.parent)
    assert not list(folder.parent.iterdir())


def test_a_manifest_tells_the_versions_and_every_changed_one_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(folder, FILES)
    versions = read_json(folder / MANIFEST)["versions"]
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert changed_versions(folder) == []
    monkeypatch.setattr(atomic, "_versions", lambda: {**versions, "numpy": "0.1"})
    assert changed_versions(folder) == [f"numpy {versions['numpy']} -> 0.1"]


def test_a_manifest_of_another_shape_is_damage(tmp_path: Path) -> None:
    for manifest in ("[]", "{}", '{"files": 3, "versions": 3}', ""):
        (tmp_path / MANIFEST).write_text(manifest)
        with pytest.raises(StorageError, match="damaged"):
            verify_folder(tmp_path)


# Files


@pytest.mark.parametrize("owner", [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize(
    "value", ["new", "half a surrogate pair: \ud800", float("nan"), float("inf")]
)
def test_a_file_that_cannot_be_written_keeps_its_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: tuple[Any, str], value: Any
) -> None:
    write_json(tmp_path / "file.json", "old")
    monkeypatch.setattr(*owner, failing(getattr(*owner), 1))
    with pytest.raises((StorageError, UnicodeEncodeError, ValueError)):
        write_json(tmp_path / "file.json", [value])
    assert read_json(tmp_path / "file.json") == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_a_missing_or_damaged_json_file_is_a_storage_error(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    for read in (read_json, load_tensors):
        with pytest.raises(
            StorageError,
            match=f"{tmp_path / 'file'}: {'missing' if content is None else 'damaged'}",
        ):
            read(tmp_path / "file")


# One user at a time, whatever the others do with the folder


def test_each_is_alone_and_gets_a_folder_where_the_one_before_removes_or_renames_it(
    folder: Path,
) -> None:
    alone = Lock()

    def use(number: int) -> None:
        with sole_user(folder):
            assert alone.acquire(blocking=False)
            (folder / str(number)).touch()
            assert len(list(folder.iterdir())) == 1
            alone.release()
            if number % 2:
                shutil.rmtree(folder)
            else:
                folder.rename(folder.with_name(f"done-{number}"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(400)))
    assert len(list(folder.parent.glob("done-*"))) == 200


def test_a_folder_that_cannot_be_made_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fail)
    for folder in (tmp_path / "file", tmp_path / "new" / "folder"):
        with pytest.raises(StorageError, match=str(folder)), sole_user(folder):
            pass


CLAIM = """
import sys
from pathlib import Path
from scale_cli.errors import RunFolderError
from scale_cli.storage.atomic import claimed, new_folder
for take in (claimed, new_folder):
    try:
        with take(Path(sys.argv[1])):
            print("free")
    except RunFolderError as error:
        print("refused" if "at work here" in str(error) else error)
"""


def taken_in_another_process(folder: Path) -> list[str]:
    """Return what another process is told that claims a folder, and then one that would write it anew."""
    command = [sys.executable, "-c", CLAIM, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_a_folder_that_is_claimed_or_being_written_is_refused_to_others_and_not_to_its_holder(
    folder: Path,
) -> None:
    with claimed(folder), claimed(folder), new_folder(folder) as partial:
        (partial / "report.json").write_text("{}")
        assert taken_in_another_process(folder) == ["refused", "refused"]
        assert (partial / "report.json").is_file()


def test_of_a_claim_that_came_to_nothing_nothing_is_left(tmp_path: Path) -> None:
    with claimed(tmp_path / "runs" / "mine" / "first"):
        pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with claimed(tmp_path / "runs" / "mine" / "first"):
        (tmp_path / "runs" / "mine" / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "mine", "other"]
