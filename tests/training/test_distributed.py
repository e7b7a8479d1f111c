from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.storage.layout import RunFolder
from scale_cli.training.run import train
from scale_cli.upscale.run import upscale


def losses(run: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def test_two_gloo_processes_train_as_one_does_at_the_same_global_batch(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    one, two = make_config("one"), make_config("two", "train.micro_batch_size=2")
    for config in (one, two):
        upscale(config)
    train(one, None, print)
    path = tmp_path / "two-processes.yaml"
    path.write_text(dump_config(two), encoding="utf-8")
    # accelerate launch starts several CPU processes through MPI only; torchrun sets the same variables without it.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "scale_cli", "train", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("processes      2 x cpu") == 1, "two work, one speaks"
    assert losses(RunFolder(two.output_dir)) == pytest.approx(losses(RunFolder(one.output_dir)), rel=1e-5)
