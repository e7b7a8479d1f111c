"""A run that is killed and resumed, beside one that is not: `python -m scripts.gpu.resume FOLDER [--small]`.

Three runs of one config train side by side on the base in FOLDER: `whole`, `again`, which only
repeats it, and `killed`, which gets SIGKILL after its second checkpoint and is resumed. FOLDER/resume.json says
how far the last two are from `whole`. Kernels whose sums have no fixed order differ from run to run, and
`again` shows by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from scale_cli.runs.folder import TRAINED, RunFolder
from scale_cli.storage.atomic import write_json
from scripts.gpu.verbs import write_config

_SAVE_EVERY_STEPS = {True: 1, False: 5}  # by --small
_POLL_S = 0.01


def start(folder: Path, name: str, verbs: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start verbs of a run; FOLDER/NAME.log gets what they print."""
    command = [sys.executable, "-m", "scripts.gpu.verbs", str(folder), verbs, "--run", name]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *options], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def kill_after_checkpoints(
    process: subprocess.Popen[bytes], run: RunFolder, num_checkpoints: int
) -> list[str]:
    """Kill a run once it has written so many checkpoints; return their names, none if it ended."""
    while process.poll() is None:
        checkpoints = sorted(path.name for path in run.checkpoints.glob("step-*"))
        if len(checkpoints) >= num_checkpoints:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers it has started
            process.wait()
            return checkpoints
        time.sleep(_POLL_S)
    return []


def distance(one: RunFolder, other: RunFolder) -> dict[str, float | bool]:
    """Return how far a run's losses and final weights are from another's."""
    losses, other_losses = _losses(one), _losses(other)
    weights, other_weights = (load_file(run.final / TRAINED) for run in (one, other))
    pairs = [(tensor, other_weights[name]) for name, tensor in weights.items()]
    return {
        "same_losses": losses == other_losses,
        "largest_loss_difference": max(
            abs(loss - other_losses[step]) for step, loss in losses.items()
        ),
        "same_weights": all(torch.equal(tensor, same) for tensor, same in pairs),
        "largest_weight_difference": max(
            (tensor.float() - same.float()).abs().max().item() for tensor, same in pairs
        ),
    }


def _losses(run: RunFolder) -> dict[int, float]:
    records = map(json.loads, run.metrics.read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_intermixed_args()

    folder: Path = given.folder
    every = _SAVE_EVERY_STEPS[given.small]
    options = ["--small"] if given.small else []
    options += ["train.log_every_steps=1", f"train.save_every_steps={every}", *given.overrides]
    runs = {name: RunFolder(folder / "runs" / name) for name in ("whole", "again", "killed")}
    write_config(folder, given.small)  # before three processes look for it

    started = {name: start(folder, name, "upscale,train", options) for name in runs}
    killed_after = kill_after_checkpoints(started["killed"], runs["killed"], num_checkpoints=2)
    if not killed_after:
        sys.exit(f"the run ended before it could be killed; see {folder / 'killed.log'}")
    started["killed"] = start(folder, "killed", "train", ["--resume", *options])
    failed = [name for name, process in started.items() if process.wait()]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {folder / f'{failed[0]}.log'}")

    again, killed = (distance(runs["whole"], runs[name]) for name in ("again", "killed"))
    measured = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "killed_after": killed_after,
        "again": again,
        "killed": killed,
    }
    write_json(folder / "resume.json", measured)
    print(json.dumps(measured, indent=1))
    if any(again[same] and not killed[same] for same in ("same_losses", "same_weights")):
        sys.exit("the resumed run differs where a repeated one does not")


if __name__ == "__main__":
    main()
