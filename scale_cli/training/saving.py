"""Checkpoints off the critical path: training pauses for a copy of what trains, the rest is done beside it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from scale_cli.storage.metrics import MetricsLog
from scale_cli.training.checkpoint import (
    take_snapshot,
    write_checkpoint,
    write_sharded_checkpoint,
)
from scale_cli.training.run import TrainingRun
from scale_cli.training.sharding import is_sharded


@dataclass
class Saver:
    """Saves the checkpoints of one run; use it in a `with` statement, which waits for the last one.

    One is being written at most: the next one waits for it. The training thread copies what trains and the moments to
    host memory; hashing the base, writing, syncing and deleting old checkpoints are the other thread's. The parts of a
    sharded model are written by all processes together, on the training thread: their exchanges must not meet a step's.
    The thread ends with the `with` statement: one that frees tensors while the interpreter ends aborts the process.
    """

    run: TrainingRun  # whose log is made durable before a checkpoint that counts on it
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
            if run.metrics is not None:
                run.metrics.sync()
            write_sharded_checkpoint(run)
        elif run.metrics is not None:
            self._start(run.metrics)
        run.saved_step = run.state.step
        self.stalled_s += time.monotonic() - started_s

    def _start(self, metrics: MetricsLog) -> None:
        snapshot = take_snapshot(self.run)

        def write() -> None:
            metrics.sync()
            write_checkpoint(self.run, snapshot)

        self._job = self._thread.submit(write)

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
