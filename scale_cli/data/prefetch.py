"""Batches made ahead, on one thread beside the one that trains on them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from scale_cli.data.batches import Batches, MicroBatch, StepBatches

_STEPS_AHEAD = 2

Item = TypeVar("Item")


class _End:
    """No more items; with the error that ended them, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Generic[Item]):
    """The items of an iterable, in order, a few of them made before they are asked for.

    One thread is enough for batches: reading a memory map and filling arrays lets go of the interpreter. Use it in a
    `with` statement, which stops the thread however the body ends.

    Args:
        items: what is iterated over, on the thread alone; an error of it is raised here, in its place.
        num_ahead: how many items may wait at most.
    """

    def __init__(self, items: Iterable[Item], num_ahead: int) -> None:
        self._ready: queue.Queue[Item | _End] = queue.Queue(num_ahead)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(iter(items),), name="prefetch", daemon=True)

    def __enter__(self) -> Prefetched[Item]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        while self._thread.is_alive():  # it may be waiting for a place
            self._discard()
            self._thread.join(timeout=0.01)

    def _discard(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            return

    def _work(self, items: Iterator[Item]) -> None:
        end = _End(None)
        try:
            for item in items:
                self._ready.put(item)
                if self._stopping.is_set():
                    return
        except BaseException as error:
            end = _End(error)
        self._ready.put(end)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # asked again, it says the same
            raise item.error or StopIteration
        return item


class BatchesAhead:
    """The batches of one process, asked for step by step in order as `Batches` is; the next are made meanwhile.

    Use it in a `with` statement, which stops the making.

    Args:
        batches: of the whole run.
        first: the step it begins with.
        rank: of the process.
        num_processes: in the run.
    """

    def __init__(self, batches: Batches, first: int, rank: int, num_processes: int) -> None:
        self._place = (rank, num_processes)
        self._steps = Prefetched(batches.from_step(first, rank, num_processes), _STEPS_AHEAD)
        self._current: StepBatches | None = None

    def __enter__(self) -> BatchesAhead:
        self._steps.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.__exit__(kind, error, trace)

    def _at(self, step: int) -> StepBatches:
        if self._current is None or self._current.step != step:
            self._current = next(self._steps)
        assert self._current.step == step, "steps come in order"
        return self._current

    def num_target_tokens(self, step: int) -> int:
        """Return the targets in a step's global batch, over all processes."""
        return self._at(step).num_target_tokens

    def micro_batches(self, step: int, rank: int = 0, num_processes: int = 1) -> list[MicroBatch]:
        """Return the micro-batches of this process in one step."""
        assert (rank, num_processes) == self._place, "made for another process"
        return self._at(step).micro_batches
