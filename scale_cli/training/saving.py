"""Checkpoints off the critical path: training pauses for a copy of what trains, the rest is done beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch
from accelerate import Accelerator

from scale_cli.storage.metrics import MetricsLog
from scale_cli.storage.records import TrainState
from scale_cli.training.checkpoint import (
    RunMetadata,
    take_snapshot,
    write_checkpoint,
    write_sharded_checkpoint,
)
from scale_cli.training.sharding import is_sharded
from scale_cli.upscale.folder import MethodModel


def in_background(work: Callable[[], None]) -> Future[None]:
    """Do some work on a thread of its own; its result, or what went wrong there, is for whoever asks.

    A process that is told to stop at once does not wait for it, as it would for an executor's: what the work leaves is
    never taken for whole.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return ended


@dataclass
class Saver:
    """Saves the checkpoints of one run; use it in a `with` statement, which waits for the last one.

    One is being written at most: the next one waits for it. The training thread copies what trains and the moments to
    host memory; hashing the base, writing, syncing and deleting old checkpoints are the other thread's. The parts of a
    sharded model are written by all processes together, on the training thread: their exchanges must not meet a step's.
    """

    metadata: RunMetadata  # of the run, for its checkpoints
    accelerator: Accelerator  # processes; the main one writes, unless the model is sharded
    model: MethodModel  # what is trained
    optimiser: torch.optim.Optimizer  # over it
    metrics: MetricsLog | None  # made durable before a checkpoint that counts on it; None except on the main process
    saved_step: int | None = None  # of the checkpoint that the run began with, if it is one of this run's own
    stalled_s: float = 0.0  # seconds that training has waited
    _job: Future[None] | None = field(default=None, init=False)

    def save(self, state: TrainState) -> None:
        """Begin a checkpoint, unless that step already has one; every process has to call this."""
        if self.saved_step == state.step:
            return
        started_s = time.monotonic()
        self.finish()
        if is_sharded(self.model):
            if self.metrics is not None:
                self.metrics.sync()
            write_sharded_checkpoint(self.metadata, self.accelerator, self.model, self.optimiser, state)
        elif self.metrics is not None:
            self._start(state, self.metrics)
        self.saved_step = state.step
        self.stalled_s += time.monotonic() - started_s

    def _start(self, state: TrainState, metrics: MetricsLog) -> None:
        snapshot = take_snapshot(self.model, self.optimiser, state)

        def write() -> None:
            metrics.sync()
            write_checkpoint(self.metadata, self.model, snapshot)

        self._job = in_background(write)

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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            started_s = time.monotonic()
            self.finish()
            self.stalled_s += time.monotonic() - started_s
        elif not isinstance(error, KeyboardInterrupt):  # a second SIGINT, which stops at once
            with suppress(Exception):  # the error under way is the one to tell
                self.finish()
