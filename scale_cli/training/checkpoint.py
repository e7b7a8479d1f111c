"""Checkpoints: what trains, the optimiser, and where the run stands, each whole or absent.

A checkpoint is a method folder (`upscale/method.py`) and beside it

    optimiser.safetensors  of every trainable parameter the moments, and what hooks keep (`methods/recipes.py`)
    init_from.json         what the run began with, where that was trained by another run (`train.init_from`)
    corpora.json           what was read of every source, by hash
    position.json          step, tokens seen, where the time went
    token_ledger.json      of every source: read, kept, dropped and why; trained, and held over in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments lie in `shards/` instead, one file a process (`storage/shards.py`). Either
kind is read by any number of processes, sharded or not. `training/run.py` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from scale_cli.config.training import TrainConfig
from scale_cli.errors import StorageError
from scale_cli.methods.recipes import Hook
from scale_cli.storage.atomic import (
    MANIFEST,
    file_sha256,
    load_tensors,
    verify_folder,
)
from scale_cli.storage.records import BranchPoint, RunFolder, TrainState
from scale_cli.storage.shards import has_shards, load_shards
from scale_cli.training.optimiser import (
    empty_optimiser_tensors,
    load_optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.sharding import is_sharded
from scale_cli.upscale.method import MethodModel, load_trained
from scale_cli.upscale.run import MethodFolder

OPTIMISER = "optimiser.safetensors"


def checkpoints(run: RunFolder) -> list[Path]:
    """Return the checkpoints of a run, oldest first; folders of any other name are somebody else's."""
    folders = [folder for folder in run.checkpoints.glob("step-*") if folder.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def newest_whole_checkpoint(run: RunFolder) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is as it was written, and a line for every one that had to be skipped."""
    skipped = []
    for folder in reversed(checkpoints(run)):
        try:
            verify_folder(folder)
        except StorageError as error:
            skipped.append(f"checkpoint {folder.name} skipped: {error}")
        else:
            return folder, skipped
    return None, skipped


def branch_point_at(folder: MethodFolder, moments: str) -> BranchPoint:
    """Return what a run begins with, of the folder that it begins with."""
    return BranchPoint(file_sha256(folder.path / MANIFEST), folder.state.step, folder.state.num_tokens, moments)


def has_moments(folder: Path) -> bool:
    """Return whether an optimiser's moments are in a folder: a checkpoint has them, `final/` has not."""
    return (folder / OPTIMISER).is_file() or has_shards(folder)


def load_checkpoint(
    checkpoint: MethodFolder,
    model: MethodModel,
    optimiser: torch.optim.Optimizer,
    train: TrainConfig | None,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Put a checkpoint's blocks and moments back, and return its position; that it is whole is known by now.

    `train` says which tensors of hooks are taken up beside the moments: the checkpoint's own settings, or those of the
    run that goes on, which may begin its average later; None where it is another run, which begins without.
    """
    folder, state = checkpoint.path, checkpoint.state
    beside = [hook for hook in hooks if train is not None and hook.keeps(train, state.step)]
    if is_sharded(model) or has_shards(folder):
        moments = empty_optimiser_tensors(model, beside)
        load_shards(folder, {**trainable_parameters(model), **moments})
    else:
        load_trained(model, folder)
        moments = load_tensors(folder / OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments, beside)
    return state
