from __future__ import annotations

import json
from pathlib import Path

import pytest

from scale_cli.biography.accuracy import SERVED
from scale_cli.commands.biography import run_biography
from scale_cli.config.biography import BiographyConfig
from scale_cli.errors import RunFolderError


def quietly(line: str) -> None:
    del line


def test_the_whole_benchmark_runs_is_not_run_twice_and_refuses_other_settings(small: BiographyConfig) -> None:
    summary = run_biography(small, quietly)
    full, route = summary.results
    assert full.steps == route.steps == [0, 2, 4, 5]
    for result in summary.results:
        for accuracy in (result.task_0, result.task_1):
            assert accuracy.keys() == set(SERVED)
            assert all(len(shares) == 4 for shares in accuracy.values())
            # Nothing is trained at step 0: both heads and both rules are the base.
            assert len({shares[0] for shares in accuracy.values()}) == 1
            assert len(set(accuracy["base"])) == 1  # and the base never changes
    report = (summary.folder / "report.md").read_text(encoding="utf-8")
    assert "| route (posterior) |" in report
    assert (summary.folder / "accuracy.svg").read_text(encoding="utf-8").count("route (cosine)") == 1
    assert [m["name"] for m in json.loads((summary.folder / "report.json").read_text())["methods"]] == ["full", "route"]

    before = {file: file.stat().st_mtime_ns for file in Path(small.output_dir).glob("methods/*.json")}
    again = run_biography(small, quietly)
    assert again.results == summary.results
    assert before == {file: file.stat().st_mtime_ns for file in before}

    with pytest.raises(RunFolderError, match=r"other settings \(people\)"):
        run_biography(small.model_copy(update={"people": small.people.model_copy(update={"task_1": 2})}), quietly)


def test_a_folder_that_holds_something_else_is_left_alone(small: BiographyConfig) -> None:
    small.output_dir.mkdir()
    (small.output_dir / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match="holds something else"):
        run_biography(small, quietly)
    assert [file.name for file in small.output_dir.iterdir()] == ["thesis.tex"]
