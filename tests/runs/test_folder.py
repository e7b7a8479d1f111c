"""Where the results of a run land, and what may be in the way."""

from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from scale_cli.errors import RunFolderError
from scale_cli.runs.folder import RunFolder, check_replaceable
from scale_cli.storage.atomic import new_folder, write_json


@pytest.mark.parametrize("name", ["run", "a/b/run"])
def test_processes_that_check_one_new_folder_at_once_all_find_it_free_and_leave_nothing(
    tmp_path: Path, name: str
) -> None:
    with ThreadPool(
        8
    ) as pool:  # the checks are system calls, during which Python runs the other threads
        pool.map(lambda _: RunFolder(tmp_path / name).check(), range(400), chunksize=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run", "a/b/c", ".", ".."])
def test_what_is_free_or_a_folder_is_fine_and_what_is_not_ours_in_it_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "data").symlink_to("/")
    (tmp_path / "upscaled").mkdir()
    (tmp_path / "upscaled" / "inside").symlink_to("../upscaled")
    monkeypatch.chdir(tmp_path)
    RunFolder(Path(name)).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "upscaled"]


@pytest.mark.parametrize(
    "name", ["file", "file/run", "file/a/b", "broken", "broken/run", "loop/run"]
)
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunFolderError) as caught:
        RunFolder(tmp_path / name).check()
    assert f"{tmp_path / name.partition('/')[0]} is not a folder" in str(caught.value)


def result(folder: Path, kind: str) -> Path:
    with new_folder(folder) as partial:
        write_json(partial / "report.json", {"kind": kind})
    return folder


def test_only_nothing_an_empty_folder_and_an_earlier_result_of_the_kind_may_be_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    for output in (
        tmp_path / "absent",
        tmp_path / "empty",
        result(tmp_path / "earlier", "scale compare"),
    ):
        check_replaceable(output, "scale compare")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "empty"]
    (tmp_path / "file").write_text("mine")
    write_json(tmp_path / "unlisted" / "report.json", {"kind": "scale compare"})
    result(tmp_path / "other", "scale comparison")
    (result(tmp_path / "added", "scale compare") / "notes.txt").write_text("mine")
    for name in ("file", "unlisted", "other", "added"):
        with pytest.raises(
            RunFolderError, match=rf"^--output .*{name}: holds something other than a scale compare"
        ):
            check_replaceable(tmp_path / name, "scale compare")
