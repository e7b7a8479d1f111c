import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scale_cli.errors import ConfigError, MissingExtraError
from scale_cli.runs.folder import RunFolder
from scale_cli.training.metrics_log import EVALUATION, MetricsLog, read_records
from scale_cli.training.tracking import check_trackers, figures, tracked
from tests.training.conftest import MakeConfig, are_equal, finished, trained


def in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    points = defaultdict(list)
    for file in sorted(folder.rglob("events.out.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if not value.tag.startswith("_hparams_"):
                    points[value.tag].append((event.step, float(make_ndarray(value.tensor))))
    return points


def in_log(run: RunFolder) -> dict[str, list[tuple[int, Any]]]:
    points: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for record in read_records(run.metrics):
        for key, value in figures(record).items():
            # TensorBoard keeps float32.
            points[key].append((record["step"], pytest.approx(value, rel=1e-6)))
    return points


def test_tensorboard_has_every_figure_of_the_log_and_the_run_the_bits_of_one_unseen(
    make_config: MakeConfig,
) -> None:
    length = ("train.max_steps=4", "train.save_every_steps=4")
    seen = ("train.trackers=[tensorboard]", "train.eval_every_steps=2")
    run = finished(make_config("run", *length, *seen))
    points = in_tensorboard(run.tensorboard)
    assert points == in_log(run)
    assert [step for step, _ in points[f"{EVALUATION}/tiny/base"]] == [2, 4]
    assert are_equal(trained(run.final), trained(finished(make_config("unseen", *length)).final))


def failing(*_: Any, **__: Any) -> None:
    raise ConnectionError("no network")


def test_a_tracker_that_fails_is_left_out_and_the_log_goes_on(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("run", "train.trackers=[wandb]")
    finished: list[bool] = []
    tracker = SimpleNamespace(finish=lambda: finished.append(True))
    accelerator = SimpleNamespace(init_trackers=lambda *_: None, log=failing, trackers=[tracker])
    log = MetricsLog(RunFolder(config.output_dir).metrics, 0)
    with tracked(log, config, accelerator):
        for step in (1, 2, 3):
            log.append({"step": step, "loss": 1.0})
    assert len(log.path.read_text().splitlines()) == 3 and finished
    error = capsys.readouterr().err
    assert error.count("warning: train.trackers: no network; the run goes on without them") == 1
    accelerator.init_trackers = failing
    with (
        pytest.raises(ConfigError, match=r"^train.trackers: no network$"),
        tracked(log, config, accelerator),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "how"), [("tensorboard", r"'scale-cli\[track\]'"), ("wandb", "wandb")]
)
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtraError, match=rf"^train.trackers {name}: needs {name}: pip install {how}$"
    ):
        check_trackers([name])
