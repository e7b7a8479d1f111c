"""Checkpoints: what trains, the optimiser, and where the run stands, each whole or absent.

A checkpoint is a method folder (`upscale/folder.py`) and beside it

    optimiser.safetensors  of every trainable parameter the moments, and what hooks keep (`methods/hooks.py`)
    init_from.json         what the run began with, where that was trained by another run (`train.init_from`)
    corpora.json           what was read of every source, by hash
    position.json          step, tokens seen, where the time went
    token_ledger.json      of every source: read, kept, dropped and why; trained, and held over in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments lie in `shards/` instead, one file a process (`storage/shards.py`). Either
kind is read by any number of processes, sharded or not. When and on which thread: `training/saving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from scale_cli.config.load import dump_config
from scale_cli.config.training import TrainConfig
from scale_cli.errors import PreservationError, StorageError
from scale_cli.methods.hooks import Hook
from scale_cli.processes import is_main
from scale_cli.storage.atomic import (
    MANIFEST,
    file_sha256,
    load_tensors,
    new_folder,
    partial_folder,
    remove_folder,
    save_tensors,
    verify_folder,
    write_json,
    write_text,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import CORPORA, TRAINED, BranchPoint, TrainState
from scale_cli.storage.shards import has_shards, load_shards, save_shards
from scale_cli.training.optimiser import (
    empty_optimiser_tensors,
    load_optimiser_tensors,
    optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.run import TrainingRun
from scale_cli.training.sharding import changed_parts, is_sharded
from scale_cli.upscale.base import changed_tensors
from scale_cli.upscale.folder import MethodModel, describe_method, load_trained
from scale_cli.upscale.run import MethodFolder
from scale_cli.upscale.tokenizer import copy_grown_tokenizer

_OPTIMISER = "optimiser.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, as it was at one instant: copies, so that training may go on."""

    state: TrainState  # where the run stood
    trained: dict[str, Tensor]  # every parameter that trains, on the CPU
    moments: dict[str, Tensor]  # the optimiser's, on the CPU


def take_snapshot(run: TrainingRun) -> Snapshot:
    """Copy what a checkpoint of a model that is not sharded has to hold."""
    moments = optimiser_tensors(run.optimiser, run.model)
    return Snapshot(run.state, _copied(trainable_parameters(run.model)), _copied(moments))


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU; a GPU writes them all into memory of its own reach, and is waited for once."""
    copies = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(
            tensor.detach(), non_blocking=True
        )
        for name, tensor in tensors.items()
    }
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def write_checkpoint(run: TrainingRun, snapshot: Snapshot) -> None:
    """Write a snapshot as a checkpoint, then delete the oldest; on any thread of a process, while the model trains."""
    folder = run.folder.checkpoint(snapshot.state.step)
    with _beside_the_training_stream(run.model.device):
        check_base(run, snapshot.state.step)
    _remove_unfit(folder)
    with new_folder(folder) as partial:
        describe_run(partial, run, snapshot.state)
        save_tensors(partial / TRAINED, snapshot.trained)
        save_tensors(partial / _OPTIMISER, snapshot.moments)
    _remove_old_checkpoints(run, snapshot.state)


def _beside_the_training_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Let copies from a GPU not wait for the steps under way, nor those for them: what is frozen needs no order."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def write_sharded_checkpoint(run: TrainingRun) -> None:
    """Write a sharded model's checkpoint, then delete the oldest; every process has to call this, between two steps."""
    accelerator, state, folder = run.accelerator, run.state, run.folder.checkpoint(run.state.step)
    check_base(run, state.step)
    if accelerator.is_main_process:
        _remove_unfit(folder)
    with _folder_of_all(folder, accelerator) as partial:
        if accelerator.is_main_process:
            describe_run(partial, run, state)
        save_shards(partial, {**trainable_parameters(run.model), **optimiser_tensors(run.optimiser, run.model)})
    if accelerator.is_main_process:
        _remove_old_checkpoints(run, state)
    accelerator.wait_for_everyone()


def _remove_unfit(folder: Path) -> None:
    """Remove what is where a checkpoint goes, where it is so damaged that nobody could tell it was one."""
    if folder.is_dir() and not (folder / MANIFEST).is_file():
        remove_folder(folder)


def _remove_old_checkpoints(run: TrainingRun, newest: TrainState) -> None:
    """Remove all but the newest and the best.

    One of a later step is a damaged one that a resume has skipped, and does not count.
    """
    best_step = None if newest.best is None else newest.best.step
    written = [folder for folder in checkpoints(run.folder) if step_of(folder) <= newest.step]
    for old in written[: -run.config.train.keep_checkpoints]:
        if step_of(old) != best_step:
            remove_folder(old)


@contextmanager
def _folder_of_all(path: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield one folder to every process, to be filled together: `new_folder` for all of them."""
    with new_folder(path) if accelerator.is_main_process else nullcontext(partial_folder(path)) as partial:
        accelerator.wait_for_everyone()  # the folder is there
        yield partial
        accelerator.wait_for_everyone()  # every file is


def check_base(run: TrainingRun, step: int) -> None:
    """Check a widened model's base against its hashes: a sharded one in parts, any other on the main process."""
    model: Any = run.model
    if not run.method.definition.widens:
        return  # it has no such base
    if run.base_parts:
        changed = changed_parts(model.base, run.base_parts)
    else:
        changed = changed_tensors(model.base, run.start.record) if is_main() else []
    if changed:
        raise PreservationError(f"step {step}: the base has changed: {', '.join(changed[:3])}")


def describe_run(folder: Path, run: TrainingRun, state: TrainState) -> None:
    """Write what a checkpoint and `final/` have in common: everything but tensors."""
    describe_method(folder, run.model, run.method, run.start.record)
    copy_grown_tokenizer(run.config, folder)
    state.save(folder)
    write_json(folder / CORPORA, run.text.contents)
    if run.branch_point is not None:
        run.branch_point.save(folder)
    run.token_ledger(state.step).save(folder)
    write_text(folder / "scale.yaml", dump_config(run.config))


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
    return (folder / _OPTIMISER).is_file() or has_shards(folder)


def load_checkpoint(
    checkpoint: MethodFolder,
    model: MethodModel,
    optimiser: torch.optim.Optimizer,
    train: TrainConfig | None,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Put a checkpoint's blocks and moments back, and return its position; that it is whole is known by now.

    Args:
        checkpoint: that is gone on from.
        model: gets its parameters.
        optimiser: gets its moments.
        train: the checkpoint's own settings, or those of the run that goes on (a longer one may begin its average
            later), which say what is taken up beside the moments; None: another run, which begins without.
        hooks: what may have kept tensors there.
    """
    folder, state = checkpoint.path, checkpoint.state
    beside = [hook for hook in hooks if train is not None and hook.keeps(train, state.step)]
    if is_sharded(model) or has_shards(folder):
        moments = empty_optimiser_tensors(model, beside)
        load_shards(folder, {**trainable_parameters(model), **moments})
    else:
        load_trained(model, folder)
        moments = load_tensors(folder / _OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments, beside)
    return state
