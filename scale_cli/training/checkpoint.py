"""Checkpoints: what trains, the optimiser, and where the run stands, each whole or absent.

A checkpoint is a method folder (`upscale/method.py`) and beside it

    optimiser.safetensors  of every trainable parameter the moments, and what hooks keep (`methods/hooks.py`)
    init_from.json         what the run began with, where that was trained by another run (`train.init_from`)
    corpora.json           what was read of every source, by hash
    position.json          step, tokens seen, where the time went
    token_ledger.json      of every source: read, kept, dropped and why; trained, and held over in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments lie in `shards/` instead, one file a process (`storage/shards.py`). Either
kind is read by any number of processes, sharded or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from scale_cli.config.training import TrainConfig
from scale_cli.errors import StorageError
from scale_cli.methods.hooks import Hook
from scale_cli.storage.atomic import (
    MANIFEST,
    file_sha256,
    load_tensors,
    new_folder,
    partial_folder,
    remove_folder,
    save_tensors,
    verify_folder,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import TRAINED, BranchPoint, TrainState
from scale_cli.storage.shards import has_shards, load_shards, save_shards
from scale_cli.training.optimiser import (
    empty_optimiser_tensors,
    load_optimiser_tensors,
    optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.run import TrainingRun
from scale_cli.training.sharding import is_sharded
from scale_cli.upscale.method import MethodModel, load_trained
from scale_cli.upscale.run import MethodFolder

_OPTIMISER = "optimiser.safetensors"
# By file name the tensors of a checkpoint as they were at one instant: copies on the CPU, so that training may go on.
Snapshot = dict[str, dict[str, Tensor]]


@dataclass
class Saver:
    """Saves the checkpoints of one run beside the loop; use it in a `with` statement, which waits for the last one.

    One is being written at most: the next one waits for it. The training thread copies what trains and the moments to
    host memory; hashing the base, writing, syncing and deleting old checkpoints are the other thread's. The parts of a
    sharded model are written by all processes together, on the training thread: their exchanges must not meet a step's.
    The thread ends with the `with` statement: one that frees tensors while the interpreter ends aborts the process.
    """

    run: TrainingRun
    stalled_s: float = 0.0  # seconds that training has waited
    _thread: ThreadPoolExecutor = field(init=False)
    _job: Future[None] | None = field(default=None, init=False)

    def save(self) -> None:
        """Begin a checkpoint, unless the position already has one; every process has to call this."""
        run = self.run
        if run.saved_step == run.state.step:
            return
        started_s = time.monotonic()
        self.finish()
        if is_sharded(run.model):
            write_checkpoint(run, run.state, None)
        elif run.metrics is not None:
            self._job = self._thread.submit(write_checkpoint, run, run.state, take_snapshot(run))
        run.saved_step = run.state.step
        self.stalled_s += time.monotonic() - started_s

    def check(self) -> None:
        """Raise what went wrong with a checkpoint that has ended by now."""
        if self._job is not None and self._job.done():
            self.finish()

    def finish(self) -> None:
        """Return when nothing is being written any more."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def __enter__(self) -> Saver:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started_s = time.monotonic()
        self._thread.shutdown()
        self.stalled_s += time.monotonic() - started_s
        if error is None:  # else that is the one to tell
            self.finish()


def take_snapshot(run: TrainingRun) -> Snapshot:
    """Copy what a checkpoint of a model that is not sharded has to hold."""
    return {
        TRAINED: _copied(trainable_parameters(run.model)),
        _OPTIMISER: _copied(optimiser_tensors(run.optimiser, run.model)),
    }


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


def write_checkpoint(run: TrainingRun, state: TrainState, snapshot: Snapshot | None) -> None:
    """Write a checkpoint, then delete the oldest.

    A snapshot is written by the main process, on any thread, while the model trains. Without one the model is sharded:
    every process has to call this, between two steps, and writes its parts.
    """
    accelerator, folder = run.accelerator, run.folder.checkpoint(state.step)
    if run.metrics is not None:
        run.metrics.sync()
    with _beside_the_training_stream(run.model.device):
        run.check_base(state.step)
    if accelerator.is_main_process and folder.is_dir() and not (folder / MANIFEST).is_file():
        remove_folder(folder)  # so damaged that it cannot be told from somebody else's folder
    with new_folder(folder) if snapshot is not None else _folder_of_all(folder, accelerator) as partial:
        if accelerator.is_main_process:
            run.describe(partial, state)
        if snapshot is None:
            save_shards(partial, {**trainable_parameters(run.model), **optimiser_tensors(run.optimiser, run.model)})
        for name, tensors in (snapshot or {}).items():
            save_tensors(partial / name, tensors)
    if accelerator.is_main_process:
        _remove_old_checkpoints(run, state)
    if snapshot is None:
        accelerator.wait_for_everyone()


def _beside_the_training_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Let copies from a GPU not wait for the steps under way, nor those for them: what is frozen needs no order."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


@contextmanager
def _folder_of_all(path: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield one folder to every process, to be filled together: `new_folder` for all of them."""
    with new_folder(path) if accelerator.is_main_process else nullcontext(partial_folder(path)) as partial:
        accelerator.wait_for_everyone()  # the folder is there
        yield partial
        accelerator.wait_for_everyone()  # every file is


def _remove_old_checkpoints(run: TrainingRun, newest: TrainState) -> None:
    """Remove all but the newest and the best.

    One of a later step is a damaged one that a resume has skipped, and does not count.
    """
    best_step = None if newest.best is None else newest.best.step
    written = [folder for folder in checkpoints(run.folder) if step_of(folder) <= newest.step]
    for old in written[: -run.config.train.keep_checkpoints]:
        if step_of(old) != best_step:
            remove_folder(old)


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
        moments = load_tensors(folder / _OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments, beside)
    return state
