"""The log of a run: every step once, however often it was stopped, and the losses it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli import terminal
from scale_cli.errors import StorageError
from scale_cli.training.metrics_log import MetricsLog, MetricsRecord, read_records
from scale_cli.training.step import StepResult, TakenStep
from tests.training.conftest import MakeConfig, finished


def record(step: int) -> MetricsRecord:
    return {"step": step, "loss": 1.0 / (step + 1), "skipped": "뉴스\u2028"}


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("damage", [b"\xff", b'{"step": 1e400}', b"[" * 100_000, b"{}", b"3"])
def test_what_is_not_json_is_not_written_and_a_damaged_record_is_named_by_its_line(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_step=0)
    for step in (1, 2):
        log.append(record(step))
    with pytest.raises(ValueError, match="JSON"):
        log.append({"step": 3, "loss": float("nan")})
    assert len(read(path)) == 2
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(StorageError, match=r"metrics.jsonl:3: damaged"):
        read_records(path)
    with pytest.raises(StorageError, match=r"metrics.jsonl:3: damaged"):
        MetricsLog(path, resumed_step=1)


@settings(max_examples=60)
@given(st.data())
def test_a_run_stopped_anywhere_and_resumed_logs_every_step_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "stopped.jsonl"
    path.unlink(missing_ok=True)
    max_steps, resumed_step = 12, 0
    for _ in range(data.draw(st.integers(0, 3))):
        log = MetricsLog(path, resumed_step)
        stopped = data.draw(st.integers(resumed_step, max_steps))
        saved = data.draw(st.integers(resumed_step, stopped))
        for step in range(resumed_step + 1, stopped + 1):
            log.append(record(step))
        # What the last checkpoint counts on is synced; a cut may take any byte that was written after it.
        durable = sum(len(json.dumps(record(step))) + 1 for step in range(1, saved + 1))
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(durable, len(content)))])
        resumed_step = saved
    log = MetricsLog(path, resumed_step)
    for step in range(resumed_step + 1, max_steps + 1):
        log.append(record(step))
    assert read(path) == [record(step) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("due", [False, True])
def test_a_resumed_run_keeps_every_record_of_its_step_but_an_evaluation_that_is_to_be_made_up_for(
    tmp_path: Path, due: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_step=0)
    for step in (1, 2, 3):
        log.append(record(step))
        log.append({"step": step, "evaluation_nats_per_token": {}})
    MetricsLog(path, resumed_step=2, evaluation_due=due)
    kept = [(1, True), (1, False), (2, True), (2, False)]
    assert [(entry["step"], "loss" in entry) for entry in read(path)] == kept[: 3 if due else 4]


def test_the_losses_by_source_are_the_means_of_the_tokens_since_the_record_before(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    result = TakenStep.result

    def noted(step: TakenStep, figures: Any) -> StepResult:
        found = result(step, figures)
        steps.append(found.by_source)
        return found

    monkeypatch.setattr(TakenStep, "result", noted)
    run = finished(make_config("run", "train.max_steps=4", "train.log_every_steps=2"))
    for entry, since in zip(read_records(run.metrics), (steps[:2], steps[2:]), strict=True):
        of_sources = [zip(*of_source, strict=True) for of_source in zip(*since, strict=True)]
        means = [sum(losses) / sum(nums) for losses, nums in of_sources]
        assert [*entry["loss_by_source"].values()] == pytest.approx(means)


def test_the_bar_shows_the_loss_of_the_text_to_learn_alone(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_APART", 0.0)
    run = finished(make_config("run", "train.max_steps=2", "corpus.sources.1.role=replay"))
    shown = re.findall(r"training: .*loss (\S+),", capsys.readouterr().err)
    learned = [entry["loss_by_source"]["petitions"] for entry in read_records(run.metrics)]
    assert {*shown} == {f"{loss:.4f}" for loss in learned}
