from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from scale_cli.errors import StorageError
from scale_cli.storage import atomic
from scale_cli.storage.atomic import (
    MANIFEST,
    changed_versions,
    new_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    save_tensors,
    verify_folder,
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


# Folders


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_of_a_new_folder_has_the_mode_that_the_umask_asks_for(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "folder") as partial:
            fill(partial, FILES)
            save_tensors(partial / "ours.safetensors", {"a": torch.ones(2)})
            save_file({"a": torch.ones(2)}, partial / "theirs.safetensors")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "folder").rglob("*") if file.is_file()}
    assert len(modes) == len(FILES) + 3
    assert set(modes.values()) == {mode}


def test_a_folder_is_absent_until_it_is_whole_and_then_replaces_the_previous_one(tmp_path: Path) -> None:
    for files in (FILES, {"other": b"second"}):
        before = contents(tmp_path / "folder")
        with new_folder(tmp_path / "folder") as partial:
            fill(partial, files)
            assert contents(tmp_path / "folder") == before
        verify_folder(tmp_path / "folder")
        assert contents(tmp_path / "folder") == files
        assert [child.name for child in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_writer_left_is_no_part_of_the_next_folder(tmp_path: Path) -> None:
    partial = tmp_path / ".folder.partial"
    fill(partial, {"stale": b"half"})
    fill(tmp_path / ".folder.previous", {"stale": b"old"})
    write_folder(tmp_path / "folder", FILES)
    write_folder(tmp_path / "folder", FILES)
    assert contents(tmp_path / "folder") == FILES
    assert [child.name for child in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StorageError])
@pytest.mark.parametrize("previous", [{}, {"old": b"content"}])
def test_a_failed_write_leaves_the_previous_folder(
    tmp_path: Path, error: type[BaseException], previous: dict[str, bytes]
) -> None:
    if previous:
        write_folder(tmp_path / "folder", previous)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error), new_folder(tmp_path / "folder") as partial:
        fill(partial, FILES)
        raise error
    assert sorted(tmp_path.rglob("*")) == before
    assert contents(tmp_path / "folder") == previous


def read_from(folder: Path) -> None:
    (folder.parent / "absent").read_bytes()


def copy_to_a_full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere/source", None, str(folder / "a.txt"))


def save_below_nothing(folder: Path) -> None:
    safetensors.torch.save_file({}, folder / "absent" / "a.safetensors")


@pytest.mark.parametrize("act", [read_from, copy_to_a_full_disk, save_below_nothing])
def test_what_fails_while_a_folder_is_filled_is_one_line_with_its_name(
    tmp_path: Path, act: Callable[[Path], object]
) -> None:
    told = pytest.raises(StorageError, match=r"(No such file|No space|Error while)")
    with told as failed, new_folder(tmp_path / "folder") as partial:
        act(partial)
    assert str(failed.value).startswith(str(tmp_path / "folder")) and "\n" not in str(failed.value)
    assert not (tmp_path / "folder").exists()


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
    [(os, "fsync", call) for call in range(1, 10)] + [(Path, "rename", 1), (Path, "rename", 2), (Path, "replace", 1)],
)
def test_a_disk_that_fails_while_a_folder_is_finished_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    write_folder(tmp_path / "folder", {"old": b"content"})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), call))
        with pytest.raises(StorageError, match=r"folder.*no space"):
            write_folder(tmp_path / "folder", FILES)
    verify_folder(tmp_path / "folder")
    assert contents(tmp_path / "folder") == {"old": b"content"}
    assert [child.name for child in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("clean_up", ["write", "remove_leftovers"])
def test_a_kill_between_the_two_renames_of_a_replacement_is_undone(tmp_path: Path, clean_up: str) -> None:
    write_folder(tmp_path / "folder", {"old": b"content"})
    (tmp_path / "folder").rename(tmp_path / ".folder.previous")
    fill(tmp_path / ".folder.partial", FILES)
    if clean_up == "write":
        with pytest.raises(RuntimeError), new_folder(tmp_path / "folder"):
            raise RuntimeError
    else:
        remove_leftovers(tmp_path)
    verify_folder(tmp_path / "folder")
    assert contents(tmp_path / "folder") == {"old": b"content"}
    assert [child.name for child in tmp_path.iterdir()] == ["folder"]


def test_a_removed_folder_is_gone_whatever_becomes_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "folder", FILES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(os.unlink, 2))
        with pytest.raises(StorageError, match="no space"):
            remove_folder(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    (tmp_path / ".x.json.partial").write_text("a file that was being written")
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_manifest_tells_the_versions_and_every_changed_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "folder", FILES)
    versions = read_json(tmp_path / "folder" / MANIFEST)["versions"]
    assert versions["torch"] == torch.__version__.partition("+")[0] or versions["torch"] == torch.__version__
    assert changed_versions(tmp_path / "folder") == []
    monkeypatch.setattr(atomic, "_versions", lambda: {**versions, "numpy": "0.1"})
    assert changed_versions(tmp_path / "folder") == [f"numpy {versions['numpy']} -> 0.1"]


# verify_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified") / "folder"
    write_folder(folder, FILES)
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "folder"))


def assert_damage_is_named(folder: Path, file: Path, content: bytes) -> None:
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        with pytest.raises(StorageError, match=str(file)):
            verify_folder(folder)
    finally:
        file.write_bytes(before)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_one_flipped_bit_in_any_file_is_detected(whole: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(f for f in whole.rglob("*") if f.is_file() and f.stat().st_size)))
    before = file.read_bytes()
    after = bytearray(before)
    after[data.draw(st.integers(0, len(before) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_damage_is_named(whole, file, bytes(after))
    verify_folder(whole)


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"files": 3}', '{"files": {"a.txt": {}}}', '{"files": ["a"]}', ""])
def test_a_manifest_of_another_shape_is_damage(copied: Path, manifest: str) -> None:
    (copied / MANIFEST).write_text(manifest, encoding="utf-8")
    with pytest.raises(StorageError, match="damaged"):
        verify_folder(copied)
