"""What stages after one another learned and kept, against the formulas on the whole matrix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.commands.compare import compare
from scale_cli.comparison.runs import load_runs
from scale_cli.comparison.stages import Learned, Stages, stages_of
from scale_cli.storage.atomic import MANIFEST, file_sha256
from scale_cli.storage.records import BranchPoint
from tests.comparison.finished_run import Made, write_json, write_run


def begun_with(folder: Path, made: Made, before: Path | None) -> Path:
    """Write a finished run that began with another one's final/."""
    final = write_run(folder, made) / "final"
    files = {"trained.safetensors": {"bytes": 1, "sha256": "t" * 64}, folder.name: {"bytes": 1, "sha256": "f" * 64}}
    write_json(final / MANIFEST, {"files": files})
    if before is not None:
        BranchPoint(file_sha256(before / "final" / MANIFEST), 100, 102_400, "fresh").save(final)
    return folder


def test_runs_that_began_with_one_another_are_stages_in_their_order_however_they_are_given(tmp_path: Path) -> None:
    first = begun_with(tmp_path / "first", Made("full", 0.4, 0.9), None)
    second = begun_with(tmp_path / "second", Made("full", 0.1, 0.7), first)
    other = begun_with(tmp_path / "other", Made("full", 0.5, 1.0), first)
    alone = begun_with(tmp_path / "alone", Made("lora"), None)
    found = stages_of(load_runs([second, alone, first, other]))
    assert [stages.title for stages in found] == ["first → second", "first → other"]
    english, korean = found[0].corpora
    assert (english.learned_in, korean.learned_in) == (0, 1)
    assert english.bits_per_byte == pytest.approx([0.95, 1.35, 1.05])
    assert [english.lost_since, english.forgotten] == pytest.approx([0.1, 0.1])
    assert [korean.lost_since, korean.forgotten] == pytest.approx([0.2, 0.2])
    assert [found[0].learned, found[0].backward_transfer] == pytest.approx([1.7, 0.2])
    assert found[1].corpora[1].learned_in == 1 and found[1].backward_transfer == pytest.approx(-0.1)


def test_the_report_has_the_matrix_and_a_note_of_stages_and_nothing_of_them_else(tmp_path: Path) -> None:
    first = begun_with(tmp_path / "first", Made("full", 0.4, 0.9), None)
    second = begun_with(tmp_path / "second", Made("full", 0.1, None), first)
    summary = compare([first, second], tmp_path / "out")
    lines = summary.lines()
    shown = " ".join(line.strip() for line in lines)
    assert "note: Stages first → second: learned to 1.7000 bits/byte" in shown and max(map(len, lines)) <= 100
    assert "since then not finite on those of earlier stages than the last. note: " in shown
    written = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert written["stages"][0]["corpora"]["청원"]["bits_per_byte"] == [2.6, pytest.approx(1.7), None]
    for page in ("report.md", "report.html"):
        text = (tmp_path / "out" / page).read_text(encoding="utf-8")
        assert "Stage after stage" in text and "above its best" in text
    compare([first], tmp_path / "out")
    assert "Stage after stage" not in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(0, 2**31))
def test_backward_transfer_and_forgetting_are_those_of_the_papers(num_stages: int, seed: int) -> None:
    """Where stage i learns corpus i, as their tasks are."""
    losses = np.random.default_rng(seed).uniform(0.5, 3.0, (num_stages + 1, num_stages))
    corpora = [Learned(str(j), "en", losses[:, j].tolist(), j + 1) for j in range(num_stages)]
    after = losses[1:]
    transfer = np.mean([after[-1, i] - after[i, i] for i in range(num_stages - 1)])
    stages = Stages([None] * num_stages, corpora)  # type: ignore[list-item]  # only counted
    assert stages.backward_transfer == pytest.approx(transfer)
    assert [corpus.forgotten for corpus in corpora] == pytest.approx(list(losses[-1] - losses.min(axis=0)))
    assert stages.learned == pytest.approx(np.mean(np.diag(after)))
