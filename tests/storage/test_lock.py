"""One user at a time, whatever the others do with the folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import claimed, new_folder, sole_user


def test_each_is_alone_and_gets_a_folder_where_the_one_before_removes_or_renames_it(tmp_path: Path) -> None:
    folder, alone = tmp_path / "folder", Lock()

    def use(number: int) -> None:
        with sole_user(folder):
            assert alone.acquire(blocking=False)
            (folder / str(number)).touch()
            assert len(list(folder.iterdir())) == 1
            alone.release()
            if number % 2:
                shutil.rmtree(folder)
            else:
                folder.rename(tmp_path / f"done-{number}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(400)))
    assert len(list(tmp_path.glob("done-*"))) == 200


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


def refused_in_another_process(folder: Path, take: str) -> bool:
    """Whether `take`, an expression of `folder`, is refused to another process."""
    program = f"""
import sys
from pathlib import Path
from scale_cli.errors import RunFolderError
from scale_cli.storage.atomic import claimed, new_folder
folder = Path(sys.argv[1])
try:
    with {take}:
        pass
except RunFolderError as error:
    sys.exit("at work here" in str(error) and 7)
"""
    return subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == 7


def test_a_claimed_folder_is_refused_to_others_and_not_to_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder), claimed(folder):
        assert refused_in_another_process(folder, "claimed(folder)")
    assert not folder.exists(), "nothing came of it"
    assert not refused_in_another_process(folder, "claimed(folder)")


def test_of_a_claim_that_came_to_nothing_nothing_is_left(tmp_path: Path) -> None:
    with claimed(tmp_path / "runs" / "mine" / "first"):
        pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with claimed(tmp_path / "runs" / "mine" / "first"):
        (tmp_path / "runs" / "mine" / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "mine", "other"]


def test_a_folder_that_is_being_written_is_refused_to_others_and_ends_whole(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    with new_folder(folder) as partial:
        (partial / "report.json").write_text("{}")
        assert refused_in_another_process(folder, "new_folder(folder)")
        assert (partial / "report.json").is_file()
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", "report.json"]
