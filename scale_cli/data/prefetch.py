"""Batches made ahead, on one thread beside the one that trains on them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from scale_cli.data.batches import Batches, StepBatches

_STEPS_AHEAD = 2

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """The items of an iterable, in order, a few of them made before they are asked for.

    One thread is enough for batches: reading a memory map and filling arrays lets go of the interpreter. Use it in a
    `with` statement, which stops the thread however the body ends. An error of the iterable is raised in its place.
    """

    def __init__(self, items: Iterable[Item], num_ahead: int) -> None:
        self._items = iter(items)
        self._num_ahead = num_ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ready: deque[Future[Item]] = deque()
        self.waited_s = 0.0  # that somebody has waited for an item

    def __enter__(self) -> Self:
        self._make_ahead()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make_ahead(self) -> None:
        while len(self._ready) < self._num_ahead:
            self._ready.append(self._thread.submit(next, self._items))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        asked_s = time.monotonic()
        item = self._ready[0].result()  # an end or an error stays the first: asked again, it says the same
        self.waited_s += time.monotonic() - asked_s
        self._ready.popleft()
        self._make_ahead()
        return item


def batches_ahead(
    batches: Batches, first: int, rank: int, num_processes: int, device: torch.device
) -> Prefetched[StepBatches]:
    """Return what one process takes, step by step from a step on, the next made meanwhile.

    For a GPU they are made in memory that it copies from by itself.
    """
    steps = batches.from_step(first, rank, num_processes)
    return Prefetched(map(_pinned, steps) if device.type == "cuda" else steps, _STEPS_AHEAD)


def _pinned(step: StepBatches) -> StepBatches:
    return replace(step, micro_batches=[micro_batch.pinned() for micro_batch in step.micro_batches])
