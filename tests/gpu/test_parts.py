from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scale_cli.storage.atomic import read_json
from scripts.gpu import checks, speed
from scripts.gpu.parts import Part, run_parts


def test_a_part_that_fails_or_hangs_does_not_end_the_rest(tmp_path: Path) -> None:
    parts = [
        Part("fails", 30, ["-c", "print('why'); raise SystemExit(3)"]),
        Part("hangs", 0.5, ["-c", "import time; time.sleep(60)"]),
        Part("works", 30, ["-c", "print('fine')"]),
    ]
    outcomes = run_parts(parts, tmp_path, budget_s=60)
    assert [outcome.exit_code for outcome in outcomes] == [3, None, 0]
    assert (tmp_path / "fails.log").read_text() == "why\n"
    written = read_json(tmp_path / "summary.json")["parts"]
    assert [part["name"] for part in written] == ["fails", "hangs", "works"]


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    (outcome,) = run_parts([Part("late", 30, ["-c", "print('begun')"])], tmp_path, budget_s=0)
    assert outcome.exit_code is None and not (tmp_path / "late.log").exists()


@pytest.mark.parametrize("parts_of", [speed.parts_of, checks.parts_of], ids=["speed", "checks"])
def test_compiled_parts_come_last_and_names_are_distinct(
    parts_of: Callable[[Path, bool], Sequence[Part]], tmp_path: Path
) -> None:
    names = [part.name for part in parts_of(tmp_path, False)]
    assert len(set(names)) == len(names)
    compiled = [name.startswith("compiled") for name in names]
    assert compiled == sorted(compiled)
