"""A tracked run is one run in its trackers, whatever stopped it; metrics.jsonl stays the truth."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, MissingExtraError
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import EVALUATION, MetricsLog, MetricsRecord
from scale_cli.training import tracking
from scale_cli.training.tracking import check_trackers, figures, tracked
from tests.training.conftest import MakeConfig


def said_nothing(line: str) -> None:
    """Training speaks to nobody here."""


def in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read every point of every curve, those that were written twice too, in the order of the files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    points = defaultdict(list)
    for file in sorted(folder.rglob("events.out.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                points[value.tag].append((event.step, float(make_ndarray(value.tensor))))
    return points


def in_log(run: RunFolder) -> dict[str, list[tuple[int, Any]]]:
    points: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for key, value in figures(record).items():
            points[key].append((record["step"], pytest.approx(value, rel=1e-6)))  # TensorBoard keeps float32
    return points


class Killed(Exception):
    """Ends training as a kill would: between two records, without a checkpoint."""


def test_a_run_that_was_killed_and_resumed_is_one_run_in_tensorboard_without_gaps_or_repeats(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        "run", "train.trackers=[tensorboard]", "train.eval_every_steps=4", "train.eval_max_documents=2"
    )
    run = RunFolder(config.output_dir)
    upscale(config)
    append = MetricsLog.append

    def killed_after_step_5(log: MetricsLog, record: MetricsRecord) -> None:
        append(log, record)
        if record["step"] == 5:
            raise Killed

    monkeypatch.setattr(MetricsLog, "append", killed_after_step_5)
    with pytest.raises(Killed):
        train(config, None, said_nothing)
    assert [step for step, _ in in_tensorboard(run.tensorboard)["loss"]] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(MetricsLog, "append", append)
    train(config, "auto", said_nothing)
    tracked_points = in_tensorboard(run.tensorboard)
    assert tracked_points == in_log(run)
    assert [step for step, _ in tracked_points["loss"]] == list(range(1, 10))
    assert [step for step, _ in tracked_points[f"{EVALUATION}/tiny/base"]] == [4, 8]
    assert [folder.name for folder in run.tensorboard.iterdir()] == ["run"]


class Remembered:
    """A tracker of somebody else's: what it was sent stays there, under the id that it was started with."""

    sent: ClassVar[dict[str, list[int]]] = defaultdict(list)

    def __init__(self, _project: str, *, id: str, **_: Any) -> None:
        self.id = id

    @property
    def tracker(self) -> Remembered:
        return self

    @property
    def resumed(self) -> bool:
        return bool(self.sent[self.id])

    @property
    def starting_step(self) -> int:
        return max(self.sent[self.id], default=-1) + 1

    def start(self) -> None:
        """Nothing to connect to."""

    finish = start

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["train.max_steps"] == 9

    def log(self, values: dict[str, float], step: int) -> None:
        assert "step" not in values
        Remembered.sent[self.id].append(step)


@pytest.fixture
def config(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(tracking, "WandBTracker", Remembered)
    monkeypatch.setattr(Remembered, "sent", defaultdict(list))
    return make_config("run", "train.trackers=[wandb]")


def log_steps(config: RunConfig, first: int, last: int, *, lose: int = 0) -> None:
    """Go on from the step before the first; the last few records are lost, with what was never synced of the log."""
    log = MetricsLog(RunFolder(config.output_dir).metrics, first - 1)
    with tracked(log, config, first - 1):
        for step in range(first, last + 1):
            log.append({"step": step, "loss": 1.0})
    lines = log.path.read_text(encoding="utf-8").splitlines(keepends=True)
    log.path.write_text("".join(lines[: len(lines) - lose]), encoding="utf-8")


def test_a_tracker_that_keeps_what_it_was_sent_gets_no_step_twice_and_none_too_few(config: RunConfig) -> None:
    log_steps(config, 1, 7, lose=2)
    log_steps(config, 4, 5)  # killed again, before it came to where it had been
    log_steps(config, 4, 9)
    assert list(Remembered.sent.values()) == [list(range(1, 10))]


def test_what_a_killed_run_had_sent_and_its_tracker_never_got_is_sent_again(config: RunConfig) -> None:
    log_steps(config, 1, 5)
    (of_run,) = Remembered.sent.values()
    del of_run[3:]  # it was on its way
    log_steps(config, 6, 9)
    assert list(Remembered.sent.values()) == [list(range(1, 10))]


@pytest.mark.parametrize("sent_to_a_server", [True, False])
def test_offline_files_of_wandb_that_nobody_has_seen_are_written_anew(
    config: RunConfig, sent_to_a_server: bool
) -> None:
    log_steps(config, 1, 5)
    (run_id,) = Remembered.sent
    offline = RunFolder(config.output_dir).root / "wandb" / f"offline-run-20260101_000000-{run_id}"
    offline.mkdir(parents=True)
    if sent_to_a_server:
        (offline / f"run-{run_id}.wandb.synced").touch()
    else:
        Remembered.sent[run_id].clear()  # they go with their folder
    log_steps(config, 6, 9)
    assert offline.is_dir() == sent_to_a_server
    assert Remembered.sent[run_id] == list(range(1, 10))


def test_a_run_that_begins_anew_is_another_one_in_the_tracker(config: RunConfig) -> None:
    log_steps(config, 1, 2)
    log_steps(config, 1, 3)
    assert list(Remembered.sent.values()) == [[1, 2], [1, 2, 3]]


def test_a_tracker_that_fails_is_left_out_and_the_log_goes_on(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(Remembered, "log", fail)
    log_steps(config, 1, 3)
    assert len(RunFolder(config.output_dir).metrics.read_text(encoding="utf-8").splitlines()) == 3
    error = capsys.readouterr().err
    assert error.count("warning: train.trackers wandb: no network; the run goes on without it") == 1
    monkeypatch.setattr(Remembered, "start", fail)
    with pytest.raises(ConfigError, match=r"^train.trackers wandb: no network$"):
        log_steps(config, 4, 5)


@pytest.mark.parametrize(("name", "how"), [("tensorboard", r"'scale-cli\[track\]'"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(
    name: str, how: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"^train.trackers {name}: needs {name}: pip install {how}$"):
        check_trackers([name])
