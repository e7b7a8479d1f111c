from __future__ import annotations

from pathlib import Path

import pytest

from scale_cli.errors import RunFolderError
from scale_cli.storage.atomic import new_folder, write_json
from scale_cli.storage.layout import check_replaceable


def result(folder: Path, kind: str) -> Path:
    with new_folder(folder) as partial:
        write_json(partial / "report.json", {"kind": kind})
    return folder


def test_nothing_an_empty_folder_and_an_earlier_result_of_the_kind_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "absent", tmp_path / "empty", result(tmp_path / "earlier", "scale join")):
        check_replaceable(output, "scale join")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "empty"]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    write_json(tmp_path / "unlisted" / "report.json", {"kind": "scale join"})
    for output in (
        tmp_path / "file",
        tmp_path / "folder",
        tmp_path / "unlisted",
        result(tmp_path / "x", "scale comparison"),
    ):
        with pytest.raises(RunFolderError, match=rf"^--output {output}: holds something other than a scale join"):
            check_replaceable(output, "scale join")


def test_what_somebody_put_beside_a_result_is_kept(tmp_path: Path) -> None:
    earlier = result(tmp_path / "earlier", "scale join")
    (earlier / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"holds notes\.txt, which is not of the scale join"):
        check_replaceable(earlier, "scale join")
