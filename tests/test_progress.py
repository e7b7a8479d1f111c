from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scale_cli import progress
from scale_cli.progress import progress_bar


@pytest.mark.parametrize("seconds_apart", [0.0, 30.0])
def test_a_log_gets_whole_lines_seldom_and_nothing_that_moves_a_cursor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds_apart: float
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_APART", seconds_apart)
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with progress_bar(total=4, desc="training", unit="step") as outer:
            for _ in range(4):
                with progress_bar(total=2, desc="evaluating", leave=False) as inner:
                    inner.update(2)
                outer.update()
    written = (tmp_path / "log").read_bytes().decode()
    assert not set(written) & {"\r", "\x1b"}
    lines = written.splitlines()
    assert all(line.startswith(("training: ", "evaluating: ")) for line in lines)
    assert bool(lines) == (seconds_apart == 0.0)
