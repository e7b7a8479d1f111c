"""A run in training: what the loop, its checkpoints and `final/` share, and how checkpoints are
written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tqdm import tqdm

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import PreservationError
from scale_cli.methods.recipes import Hook, trainable_parameters
from scale_cli.processes import all_succeed, group_beside, is_main, share
from scale_cli.runs.folder import TRAINED, RunFolder, step_of
from scale_cli.runs.new_tokens import copy_grown_tokenizer
from scale_cli.runs.opened import MethodFolder
from scale_cli.storage.atomic import (
    MANIFEST,
    new_folder,
    partial_path,
    remove_folder,
    save_tensors,
)
from scale_cli.storage.shards import shard_of
from scale_cli.terminal import printable, shows_lines
from scale_cli.training.checkpoint import OPTIMISER, describe_trained
from scale_cli.training.metrics_log import MetricsLog, MetricsRecord
from scale_cli.training.observing import Observer
from scale_cli.training.optimiser import optimiser_tensors
from scale_cli.training.records import BranchPoint, TrainState
from scale_cli.training.sharding import is_sharded, parts_here
from scale_cli.upscale.base_hashes import changed_tensors, tensor_sha256, versions
from scale_cli.upscale.building import MethodModel

_SILENT_S = 1.0  # a longer wait is said


@dataclass(frozen=True)
class Snapshot:
    """Copies of what this process writes of a checkpoint, so that training can continue meanwhile."""

    files: dict[str, dict[str, Tensor]]  # copies on the CPU, by file name
    header: dict[str, str] | None  # of a sharded file: the places of its parts
    rewritten: list[str]  # tensors of the base that were written to since the run was opened


@dataclass
class TrainingRun:
    """Everything that training uses."""

    start: MethodFolder  # `upscaled/` of the run
    corpora: list[TokenisedCorpus]  # to train on, one per source
    batches: Batches  # of the whole run
    accelerator: Accelerator  # processes and devices
    model: MethodModel  # the trained model
    # the model as it is run: by Accelerate (DistributedDataParallel with several processes), or
    # sharded
    wrapped: nn.Module
    optimiser: torch.optim.Optimizer  # over the trainable parameters
    hooks: Sequence[Hook]  # called around every update
    observer: Observer | None  # evaluates during training; None if nothing is evaluated
    state: TrainState  # where the run stands
    metrics: MetricsLog | None  # the log; None except on the main process
    branch_point: BranchPoint | None  # the folder of another run that it began with
    saved_step: int | None  # of the last checkpoint that is written or being written
    scaler: torch.amp.GradScaler = field(init=False)  # of the loss; enabled only with fp16
    # hashes of this process's parts of a sharded base; `base.json` has those of any other base
    base_parts: dict[str, str] = field(default_factory=dict, init=False)
    base_versions: dict[str, list[int]] = field(init=False)  # of the base's tensors in this process
    # processes that write a checkpoint together; None if only the main one writes
    beside: ProcessGroup | None = field(default=None, init=False)
    _began_s: float = field(init=False)  # when it would have begun, had nothing interrupted it
    _thread: ThreadPoolExecutor = field(init=False)  # writes checkpoints
    _job: Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        is_enabled = self.config.train.mixed_precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=is_enabled)
        if self.state.loss_scale is not None:
            steps = self.state.loss_scale_steps
            reached = {"scale": self.state.loss_scale, "_growth_tracker": steps}
            self.scaler.load_state_dict(self.scaler.state_dict() | reached)
        if is_sharded(self.model):
            self.beside = group_beside()
            self.base_parts = {name: tensor_sha256(part) for name, part in self.base_here().items()}
        self.base_versions = versions(self.base_here())

    @property
    def config(self) -> RunConfig:
        return self.start.run.config

    @property
    def train(self) -> TrainConfig:
        """The settings of training, with the rate that was found if the config leaves it open."""
        train = self.config.train
        return train if train.lr != "auto" else train.model_copy(update={"lr": self.state.lr})

    @property
    def folder(self) -> RunFolder:
        return self.start.run.folder

    def say(self, line: str) -> None:
        """Print a line above the progress bar; where none are wanted, only warnings."""
        wanted = shows_lines() or line.startswith("warning:")
        if wanted and self.accelerator.is_main_process:
            tqdm.write(printable(line), file=sys.stderr)

    def log(self, record: MetricsRecord) -> None:
        """Write a record to the log; only the main process has one."""
        if self.metrics is not None:
            self.metrics.append(record)

    def count_time(self, what: str, since_s: float) -> None:
        """Add what has passed since a time to one of the run's times, and bring the whole time up
        to now.
        """
        now_s = time.monotonic()
        times = {what: getattr(self.state, what) + now_s - since_s}
        self.state = replace(self.state, elapsed_s=now_s - self._began_s, **times)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Write checkpoints in a thread while the body runs, and wait for the last one.

        At most one is being written: the next one waits for it. The training thread copies this
        process's trainable parameters and moments to host memory. The other thread writes, syncs and
        deletes old checkpoints. It ends with the body: a thread that frees
        tensors while the interpreter ends aborts the process.
        """
        self._began_s = time.monotonic() - self.state.elapsed_s
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as self._thread:
            yield
            started_s = time.monotonic()
            self.finish_saving()  # not reached if the body fails: its error is the one to report
            self.count_time("saving_s", started_s)
        self.accelerator.wait_for_everyone()

    def save(self) -> None:
        """Begin a checkpoint, unless this step already has one; every process must call this.

        All processes wait for the previous checkpoint, which may take longer than a step's timeout.
        """
        if self.saved_step == self.state.step:
            return
        started_s = time.monotonic()
        self.finish_saving()
        self.accelerator.wait_for_everyone()
        if scale := self.scaler.state_dict():
            scaled = {"loss_scale": scale["scale"], "loss_scale_steps": scale["_growth_tracker"]}
            self.state = replace(self.state, **scaled)
        if self.beside is not None or self.metrics is not None:
            self._job = self._thread.submit(write_checkpoint, self, self.state, take_snapshot(self))
        self.saved_step = self.state.step
        self.count_time("saving_s", started_s)

    def finish_saving(self, *, wait: bool = True) -> None:
        """Raise the error of the checkpoint being written, if it failed; without `wait`, only if it
        has ended.
        """
        if self._job is not None and (wait or self._job.done()):
            job = self._job
            self._job = None
            if futures.wait([job], timeout=_SILENT_S).not_done:
                self.say(f"waiting for the checkpoint of step {self.saved_step:,} to be written")
            job.result()

    def base_here(self) -> dict[str, Tensor]:
        """Return this process's part of every tensor of a widened model's base; call it between
        steps.
        """
        model: Any = self.model
        return parts_here(model.base) if self.config.method.definition.widens else {}

    def check_frozen_base(self, step: int) -> None:
        """Check a widened model's base by hash: each process its parts, or the main process a whole
        base.
        """
        model: Any = self.model
        changed = []
        if self.base_parts:
            here = parts_here(model.base)
            changed = [
                name
                for name, expected in self.base_parts.items()
                if tensor_sha256(here[name]) != expected
            ]
        elif self.config.method.definition.widens and is_main():
            changed = changed_tensors(model.base, self.start.record)
        _refuse_changed_base(step, changed)

    def describe(self, folder: Path, state: TrainState) -> None:
        """Write the files that a checkpoint and `final/` share: everything but tensors."""
        copy_grown_tokenizer(self.config, folder)
        if self.branch_point is not None:
            self.branch_point.save(folder)
        describe_trained(
            folder,
            self.model,
            self.config,
            self.start.record,
            state=state,
            corpora=self.corpora,
            trained=self.batches.trained_tokens(state.step),
        )


def take_snapshot(run: TrainingRun) -> Snapshot:
    """Copy what this process must write of a checkpoint."""
    trained = trainable_parameters(run.model)
    moments = optimiser_tensors(run.optimiser, run.model)
    now = versions(run.base_here())
    rewritten = [name for name, version in run.base_versions.items() if now[name] != version]
    if run.beside is None:
        return Snapshot({TRAINED: _copied(trained), OPTIMISER: _copied(moments)}, None, rewritten)
    shard = shard_of({**trained, **moments}, share())
    return Snapshot({shard.file: _copied(shard.tensors)}, shard.header, rewritten)


def _refuse_changed_base(step: int, changed: Sequence[str]) -> None:
    if changed:
        raise PreservationError(f"step {step}: the base has changed: {', '.join(changed[:3])}")


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU; from a GPU they go to pinned memory, with one wait for all."""
    copies = {
        name: tensor.detach().to("cpu", non_blocking=True, copy=True)
        for name, tensor in tensors.items()
    }
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def write_checkpoint(run: TrainingRun, state: TrainState, snapshot: Snapshot) -> None:
    """Write a checkpoint, then delete old ones; any thread may call this while the model trains.

    For a sharded model every process must call this, and writes its parts. The processes exchange
    only whether each succeeded, in a group of their own. The folder is whole if all succeeded, and
    absent otherwise.
    """
    folder = run.folder.checkpoint(state.step)
    partial = partial_path(folder)
    with ExitStack() as held:
        with all_succeed(run.beside):
            if run.metrics is not None:
                run.metrics.sync()
                if folder.is_dir() and not (folder / MANIFEST).is_file():
                    remove_folder(folder)  # so damaged that `new_folder` would refuse to replace it
                held.enter_context(new_folder(folder))  # at its end the folder gets its name
        with all_succeed(run.beside):
            _refuse_changed_base(state.step, snapshot.rewritten)
            if is_main():
                run.describe(partial, state)
            for name, tensors in snapshot.files.items():
                save_tensors(partial / name, tensors, snapshot.header)
    if is_main():
        # All but the newest `keep_checkpoints` and the best. A checkpoint of a later step is a
        # damaged one that a resume has skipped; it does not count.
        best_step = None if state.best is None else state.best.step
        written = [folder for folder in run.folder.saved if step_of(folder) <= state.step]
        for old in written[: -run.config.train.keep_checkpoints]:
            if step_of(old) != best_step:
                remove_folder(old)
