"""One user at a time, whatever the others do with the folder."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest

from scale_cli.storage.lock import sole_user


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
        list(threads.map(use, range(2000)))
    assert len(list(tmp_path.glob("done-*"))) == 1000


def test_a_file_of_that_name_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    with pytest.raises(NotADirectoryError), sole_user(tmp_path / "folder"):
        pass
