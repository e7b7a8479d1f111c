"""`scale run` as docs/processes.md starts it: by torchrun, in processes of its making, and by recipes for clusters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scale_cli.commands.prepare import prepare
from scale_cli.commands.run import run_pipeline
from scale_cli.commands.verify import verify
from scale_cli.config.load import load_config
from scale_cli.data.tokens import PARTS
from scale_cli.runs.folder import RunFolder
from scale_cli.training.records import TrainState
from tests.small_runs import write_config
from tests.test_processes import files, losses
from tests.training.conftest import configs_in

PATIENCE_S = 600
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a verb in two processes; what is printed is of both."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "-m", "scale_cli", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_launched_run_is_one_process_s(shared_data: Path, tmp_path: Path) -> None:
    make = configs_in(tmp_path, shared_data, tmp_path / "tokens")
    # Muon's products in bfloat16 would magnify the rounding of the gradients' sums.
    adamw = "train.optimiser=adamw"
    one, two = make("one", adamw), make("two", adamw)
    run_pipeline(one)
    ended = launched("run", str(tmp_path / "two.yaml"), adamw)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for said in ("== upscale", "processes      2 x cpu", "== export"):
        assert ended.stdout.count(said) == 1, "two work, one speaks"
    assert files(two.output_dir) == files(one.output_dir)
    assert losses(RunFolder(two.output_dir)) == pytest.approx(
        losses(RunFolder(one.output_dir)), rel=1e-5
    )
    assert TrainState.load(RunFolder(two.output_dir).final).step == one.train.max_steps
    verify(two.output_dir)


@pytest.fixture
def config_file(shared_data: Path, tmp_path: Path) -> Path:
    configs_in(tmp_path, shared_data, tmp_path / "tokens")("run")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [(["model.base=nowhere"], "nowhere"), (["train.lr=100", "train.warmup_steps=0"], "not finite")],
)
def test_a_launched_run_that_is_refused_or_diverges_says_so_once(
    config_file: Path, overrides: list[str], said: str
) -> None:
    ended = launched("run", str(config_file), *overrides)
    assert ended.returncode == 1
    # What follows is the launcher's own, of the end of its processes.
    told = [
        line
        for line in ended.stderr.splitlines()
        if line.startswith(("error: ", "stopped by ", "terminate "))
    ]
    assert len(told) == 1 and said in told[0], ended.stderr


# Two machines, both this one. In place of Slurm's programs: start the command on each, name them, note a requeue.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
wait $first && wait $second
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; echo localhost; else echo "$@" >> "$REQUEUED"; fi
"""
LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"


def finished(folder: Path) -> bool:
    return (folder / "export").is_dir() and TrainState.load(RunFolder(folder).final).step > 0


def cluster(tmp_path: Path, **variables: str) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return (
        os.environ
        | {"PATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        | variables
    )


def test_the_slurm_recipe_runs_on_two_machines_and_queues_itself_again_until_the_run_is_done(
    config_file: Path, tmp_path: Path
) -> None:
    requeued, folder = tmp_path / "requeued", tmp_path / "run"
    environment = cluster(
        tmp_path, SLURM_NNODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="x", REQUEUED=str(requeued)
    )

    def submit(hours: str) -> None:
        command = ["bash", str(LAUNCH / "slurm.sbatch"), str(config_file), str(folder), hours]
        subprocess.run(command, env=environment, timeout=PATIENCE_S, check=True)

    submit("1e-9")
    assert requeued.read_text() == "requeue 7\n" and not finished(folder)
    submit("1")
    assert requeued.read_text() == "requeue 7\n" and finished(folder)


def test_the_slurm_recipe_prepares_in_an_array_and_joins_to_what_one_process_writes(
    stories: Path, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(
            f"Once upon a time there were {number} cats.\n\n" * 9
        )
    text = {"path": str(tmp_path / "[0-9].txt"), "language": "en"}
    corpus = {"cache_dir": str(tmp_path), "sources": [{"name": "tales", **text}]}
    held_out = {"perplexity": [{"name": "kept", "role": "retention", **text}]}
    path = write_config(tmp_path, stories, corpus=corpus, evaluation=held_out)
    array = [{"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "2"} for task in ("1", "2")]
    for task in [*array, {}]:
        command = [
            "bash",
            str(LAUNCH / "prepare.sbatch"),
            str(path),
            f"corpus.cache_dir={tmp_path}/many",
        ]
        subprocess.run(command, env=cluster(tmp_path, **task), timeout=PATIENCE_S, check=True)
    assert len(list((tmp_path / "many" / PARTS).iterdir())) == 0
    for corpus in prepare(load_config(path))["corpora"].values():
        joined = tmp_path / "many" / corpus["folder"].name
        assert {file.name: file.read_bytes() for file in joined.iterdir()} == {
            file.name: file.read_bytes() for file in corpus["folder"].iterdir()
        }


def test_the_skypilot_recipe_runs_on_two_machines(config_file: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    given = {"CONFIG": str(config_file), "RUN_FOLDER": str(tmp_path / "run")}
    assert given.keys() <= recipe["envs"].keys()
    of_cluster = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    }
    machines = [
        subprocess.Popen(
            ["bash", "-c", recipe["run"]],
            env=cluster(tmp_path / rank, **given, **of_cluster, SKYPILOT_NODE_RANK=rank),
        )
        for rank in ("0", "1")
    ]
    assert [machine.wait(PATIENCE_S) for machine in machines] == [0, 0]
    assert finished(tmp_path / "run")
