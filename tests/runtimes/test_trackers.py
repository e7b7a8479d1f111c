"""wandb offline, mlflow and trackio on their own disks: a run that was killed and resumed is one run, whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.upscale import upscale
from scale_cli.config.load import dump_config
from scale_cli.storage.layout import RunFolder
from scale_cli.training.tracking import figures
from tests.training.conftest import configs_in

READER = Path(__file__).with_name("tracked.py")
NUM_STEPS, KILLED_AFTER = 40, 23


def in_log(run: RunFolder) -> dict[str, list[list[Any]]]:
    points = defaultdict(list)
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for key, value in figures(record).items():
            points[key].append([record["step"], pytest.approx(value)])
    return points


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_run_that_was_killed_and_resumed_is_one_run_in_its_tracker_without_gaps_or_repeats(
    name: str, trackers: Path, shared_data: Path, tmp_path: Path
) -> None:
    settings = (f"max_steps={NUM_STEPS}", "save_every_steps=10", "eval_every_steps=6", "eval_max_documents=1")
    make = configs_in(tmp_path, shared_data, tmp_path / "tokens")
    config = make("run", f"train.trackers=[{name}]", *(f"train.{setting}" for setting in settings))
    upscale(config)
    (tmp_path / "tracked.yaml").write_text(dump_config(config), encoding="utf-8")
    stores = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "TRACKIO_DIR": str(tmp_path / "trackio")}
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, **stores, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [str(trackers), "-m", "scale_cli", "train", str(tmp_path / "tracked.yaml")]
    run = RunFolder(config.output_dir)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as first:
        while first.poll() is None and (not run.metrics.is_file() or _lines(run.metrics) < KILLED_AFTER):
            time.sleep(0.005)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    resumed = subprocess.run([*command, "--resume", "auto"], env=environment, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    asked = [str(trackers), str(READER), name, str(run.root), config.train.project]
    read = subprocess.run(asked, env=environment, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    (curves,) = json.loads(read.stdout).values()
    expected = in_log(run)
    assert [step for step, _ in expected["loss"]] == list(range(1, NUM_STEPS + 1))
    assert curves.keys() >= expected.keys()
    for key, points in expected.items():
        if key.endswith("_s") or key == "peak_memory_bytes":  # a step that is taken again takes another time
            assert [step for step, _ in curves[key]] == [step for step, _ in points], key
        else:
            assert curves[key] == points, key


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
