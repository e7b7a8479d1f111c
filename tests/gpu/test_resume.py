"""What is said of a run that was killed and resumed."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from scale_cli.runs.folder import TRAINED, RunFolder
from scripts.gpu.resume import distance, kill_after_checkpoints


def finished(folder: Path, losses: list[float], weight: float) -> RunFolder:
    run = RunFolder(folder)
    run.final.mkdir(parents=True)
    save_file({"w": torch.tensor([1.0, weight])}, run.final / TRAINED)
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_a_run_with_the_same_losses_and_weights_is_at_no_distance(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, [3.0, 2.0], weight=1.0) for name in ("one", "other")]

    assert distance(*runs) == {
        "same_losses": True,
        "largest_loss_difference": 0.0,
        "same_weights": True,
        "largest_weight_difference": 0.0,
    }


def test_the_largest_difference_of_losses_and_of_weights_is_told(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", [3.0, 2.0], weight=1.0)
    resumed = finished(tmp_path / "resumed", [3.0, 2.25], weight=1.5)

    assert distance(whole, resumed) == {
        "same_losses": False,
        "largest_loss_difference": 0.25,
        "same_weights": False,
        "largest_weight_difference": 0.5,
    }


def test_a_run_is_killed_after_its_second_checkpoint_and_not_before(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    writes = "import os, sys, time\nfor path in sys.argv[1:]: os.makedirs(path)\ntime.sleep(60)"
    places = [str(run.checkpoint(step)) for step in (5, 10)]
    process = subprocess.Popen([sys.executable, "-c", writes, *places], start_new_session=True)

    assert kill_after_checkpoints(process, run, 2) == ["step-00000005", "step-00000010"]
    assert process.returncode == -9


def test_a_run_that_ends_first_is_not_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)

    assert kill_after_checkpoints(process, RunFolder(tmp_path), 2) == []
