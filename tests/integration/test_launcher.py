"""`scale run` as docs/processes.md starts it: by torchrun, in processes of its making."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scale_cli.commands.run import run_pipeline
from scale_cli.commands.verify import verify
from scale_cli.config.load import dump_config
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import TrainState
from tests.test_processes import files, losses
from tests.training.conftest import configs_in

PATIENCE_S = 600
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a verb in two processes; what is printed is of both."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "-m", "scale_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_launched_run_is_one_process_s(shared_data: Path, tmp_path: Path) -> None:
    make = configs_in(tmp_path, shared_data, tmp_path / "tokens")
    one, two = make("one"), make("two")
    run_pipeline(one, lambda _: None)
    path = tmp_path / "two.yaml"
    path.write_text(dump_config(two), encoding="utf-8")
    ended = launched("run", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for said in ("== upscale", "processes      2 x cpu", "== export"):
        assert ended.stdout.count(said) == 1, "two work, one speaks"
    assert files(two.output_dir) == files(one.output_dir)
    assert losses(RunFolder(two.output_dir)) == pytest.approx(losses(RunFolder(one.output_dir)), rel=1e-5)
    assert TrainState.load(RunFolder(two.output_dir).final).step == one.train.max_steps
    verify(two.output_dir).require()


def test_a_launched_run_that_is_refused_says_so_once(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(configs_in(tmp_path, shared_data, tmp_path / "tokens")("one")), encoding="utf-8")
    ended = launched("run", str(path), "model.base=nowhere")
    assert ended.returncode != 0
    # What follows is the launcher's own, of the end of its processes.
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "nowhere" in errors[0], ended.stderr


def test_a_launched_run_that_diverges_says_so_once(shared_data: Path, tmp_path: Path) -> None:
    config = configs_in(tmp_path, shared_data, tmp_path / "tokens")("one", "train.lr=100", "train.warmup_steps=0")
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    ended = launched("run", str(path))
    assert ended.returncode == 1
    told = [line for line in ended.stderr.splitlines() if line.startswith(("error: ", "stopped by ", "terminate "))]
    assert len(told) == 1 and "not finite" in told[0], ended.stderr
