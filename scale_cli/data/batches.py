"""Packing and mixing: which tokens are in which batch, as a pure function of (seed, step, rank).

A source is one long stream of framed documents, cut into windows of T inputs. A window's targets
are its inputs shifted by one, across the cut. So every token but the stream's first is a target
exactly once an epoch; in conversations, only the learned tokens are. The last window is padded; its
padding has no targets.

A window begins as a document does: with BOS, or with the token that stands between documents. Where
it is cut inside a document, that token is put before it, and takes the place of one input.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from scale_cli.data.encoding import Flags, Ids, Integers
from scale_cli.data.ledger import TrainedTokens

_STEPS_AHEAD = 2
# The target that torch's cross-entropy ignores; repeated in model/head_loss.py, which is exported.
IGNORED = -100


Item = TypeVar("Item")


class PackedWindows:
    """A token stream as windows of `sequence_length` inputs and as many targets; `learned` masks
    the targets, and `boundary` is the token that every window begins with.

    If `offsets` give the documents' beginnings in the stream, positions and attention restart at
    each document: at its first token, or `lead` tokens earlier, at the token that its first token
    is predicted from.
    """

    def __init__(
        self,
        ids: Ids,
        sequence_length: int,
        learned: Flags | None = None,
        offsets: Ids | None = None,
        *,
        lead: int = 0,
        boundary: int | None = None,
    ) -> None:
        assert len(ids) >= 2, "a stream needs an input and a target"
        self.ids = ids
        self.sequence_length = sequence_length
        self._learned = learned
        self.offsets = offsets
        self._lead = lead
        self._boundary = boundary
        # Windows share a token: the last target of one is the first read from the stream by the next.
        self._stride = sequence_length if boundary is None else sequence_length - 1
        starts = np.arange(0, len(ids) - 1, self._stride)
        if learned is None:
            self.num_targets: Integers = np.minimum(self._stride, len(ids) - 1 - starts)
        else:
            self.num_targets = np.add.reduceat(learned[1:], starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.num_targets)

    def window(self, index: int) -> tuple[Integers, Integers]:
        """Return a window's inputs and targets, both (T,); padding is input 0 and target IGNORED."""
        start = index * self._stride
        ids = self.ids[start : start + self._stride + 1]
        before = self._put_before(start)
        read = slice(len(before), len(before) + len(ids) - 1)
        inputs = np.zeros(self.sequence_length, dtype=np.int64)
        targets = np.full(self.sequence_length, IGNORED, dtype=np.int64)
        inputs[: len(before)] = before
        inputs[read] = ids[:-1]
        targets[read] = ids[1:]
        if self._learned is not None:
            targets[read][~self._learned[start + 1 : start + len(ids)]] = IGNORED
        return inputs, targets

    def _put_before(self, start: int) -> list[int]:
        """Return what is put before a window that begins at `start`: the boundary, if it lacks it."""
        if self._boundary is None or self.ids[start] == self._boundary:
            return []
        return [self._boundary]

    def positions(self, index: int) -> Integers | None:
        """Return each input's position, (T,), in its document or, if that began earlier, window;
        padding counts on. None if documents are not isolated.
        """
        if self.offsets is None:
            return None
        window_start = index * self._stride
        first_restart = window_start + self._lead
        end = min(first_restart + self._stride, len(self.ids) - 1 + self._lead)
        first, last = np.searchsorted(self.offsets, (first_restart, end))
        begins = np.zeros(self.sequence_length, dtype=np.int64)
        num_before = len(self._put_before(window_start))
        restarts = self.offsets[first:last] - first_restart + num_before
        begins[restarts] = restarts
        return np.arange(self.sequence_length) - np.maximum.accumulate(begins)


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass."""

    input_ids: Tensor  # (micro_batch_size, T)
    targets: Tensor  # (micro_batch_size, T), IGNORED where there is none
    sources: Tensor  # (micro_batch_size,), each sequence's source
    position_ids: Tensor | None = None  # (micro_batch_size, T), if documents are isolated
    # weight of each sequence's divergence from the base, if any has one; on the host, so that no
    # device is asked
    distillation: tuple[float, ...] | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copy it to a device; from pinned memory, without waiting for the copy."""
        return self.changed(lambda tensor: tensor.to(device, non_blocking=True))

    def changed(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return it with each of its tensors changed."""
        tensors = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **cast("Any", tensors))


def stacked(
    sources: Sequence[PackedWindows],
    located: Sequence[tuple[int, int]],
    distillation: tuple[float, ...] | None = None,
) -> MicroBatch:
    """Stack windows, each given as (source, index in the source), into one micro-batch."""
    windows = [sources[source].window(window) for source, window in located]
    inputs, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*windows, strict=True))
    positions = [sources[source].positions(window) for source, window in located]
    isolated = [row for row in positions if row is not None]  # all rows, or none
    position_ids = torch.from_numpy(np.stack(isolated)) if isolated else None
    return MicroBatch(
        inputs, targets, torch.tensor([source for source, _ in located]), position_ids, distillation
    )


@dataclass(frozen=True)
class StepBatches:
    """The batches of one process in one step."""

    step: int  # counted from 0
    micro_batches: list[MicroBatch]
    num_targets: tuple[int, ...]  # of the global batch, over all processes, by source


class Batches:
    """All batches of a run.

    Sample n of the run (0 is the first sequence of step 0) comes from a source drawn by weight. The
    k-th sample drawn from a source is the k-th window of that source's epochs; each epoch has its
    own order. Nothing depends on the number of processes, so a step's global batch is the same on
    one device and on eight. A longer run begins with the same batches.

    Args:
        sources: the windows of each source.
        weights: each source's share of the samples, relative to the others; some may be 0.
        num_steps: steps of the run.
        seed: decides draws and orders.
        global_batch_size: sequences per step.
        micro_batch_size: sequences a process holds at once.
        distillation: each source's weight of the divergence from the base; None: all 0.
    """

    def __init__(
        self,
        sources: Sequence[PackedWindows],
        weights: Sequence[float],
        *,
        num_steps: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        distillation: Sequence[float] | None = None,
    ) -> None:
        self.sources = sources
        self.distillation = distillation or [0.0] * len(sources)
        self.seed = seed
        self.num_steps = num_steps
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        num_samples = num_steps * global_batch_size
        draws = np.random.default_rng([seed, 0]).random(num_samples)
        bounds = np.cumsum(weights) / np.sum(weights)
        # The last bound may round to just below 1; a draw above it gets the last source with a
        # weight.
        drawn = np.minimum(
            np.searchsorted(bounds, draws, side="right"), np.flatnonzero(weights)[-1]
        )
        self._source_of = drawn.astype(np.uint16)
        self._turn_of = np.zeros(num_samples, dtype=np.int64)
        for index in range(len(sources)):
            mine = self._source_of == index
            self._turn_of[mine] = np.arange(mine.sum())
        self._epoch_order = lru_cache(maxsize=2 * len(sources))(self._shuffled)

    def _shuffled(self, source: int, epoch: int) -> Integers:
        random = np.random.default_rng([self.seed, 1, source, epoch])
        return random.permutation(len(self.sources[source]))

    def windows_of(self, step: int) -> list[tuple[int, int]]:
        """Return (source, window) of every sequence of a step's global batch."""
        located = []
        first = step * self.global_batch_size
        for sample in range(first, first + self.global_batch_size):
            source = int(self._source_of[sample])
            epoch, position = divmod(int(self._turn_of[sample]), len(self.sources[source]))
            located.append((source, int(self._epoch_order(source, epoch)[position])))
        return located

    def of_step(self, step: int, rank: int = 0, num_processes: int = 1) -> StepBatches:
        """Return the batches of one process in one step (steps count from 0)."""
        located = self.windows_of(step)
        num_targets = [0] * len(self.sources)
        for source, window in located:
            num_targets[source] += int(self.sources[source].num_targets[window])

        micro_batches = []
        for start in range(0, self.global_batch_size, self.micro_batch_size * num_processes):
            first = start + rank * self.micro_batch_size
            mine = located[first : first + self.micro_batch_size]
            distilled = tuple(self.distillation[source] for source, _ in mine)
            micro_batches.append(stacked(self.sources, mine, distilled if any(distilled) else None))
        return StepBatches(step, micro_batches, tuple(num_targets))

    def trained_tokens(self, num_steps: int) -> list[TrainedTokens]:
        """Return, for every source, the targets trained in the first steps and those left in its
        unfinished epoch.
        """
        drawn = self._source_of[: num_steps * self.global_batch_size]
        trained = []
        for source, windows in enumerate(self.sources):
            num_whole, num_begun = divmod(int((drawn == source).sum()), len(windows))
            begun = self._epoch_order(source, num_whole)[:num_begun]
            of_epoch = int(windows.num_targets.sum())
            of_begun = int(windows.num_targets[begun].sum())
            trained.append(
                TrainedTokens(
                    num_trained=num_whole * of_epoch + of_begun,
                    num_epochs=num_whole + bool(num_begun),
                    num_held_over=of_epoch - of_begun if num_begun else 0,
                )
            )
        return trained


class Prefetched(Generic[Item]):
    """Iterate over an iterable, with the next few items made ahead by a thread.

    One thread is enough for batches: reading a memory map and filling arrays release the GIL. Use
    it in a `with` statement, which stops the thread. An error of the iterable is raised in place of
    its item.
    """

    def __init__(self, items: Iterable[Item], num_ahead: int) -> None:
        self._items = iter(items)
        self._num_ahead = num_ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ready: deque[Future[Item]] = deque()
        self.waited_s = 0.0  # total wait for items

    def __enter__(self) -> Self:
        self._make_ahead()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make_ahead(self) -> None:
        while len(self._ready) < self._num_ahead:
            self._ready.append(self._thread.submit(next, self._items))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        asked_s = time.monotonic()
        # An end or an error stays first, and is raised again at the next call.
        item = self._ready[0].result()
        self.waited_s += time.monotonic() - asked_s
        self._ready.popleft()
        self._make_ahead()
        return item


def batches_ahead(
    batches: Batches,
    first: int,
    rank: int,
    num_processes: int,
    device: torch.device,
) -> Prefetched[StepBatches]:
    """Return one process's batches from step `first` on, with the next ones made ahead.

    For a GPU, the batches are in pinned memory.
    """
    of_each = (
        batches.of_step(step, rank, num_processes) for step in range(first, batches.num_steps)
    )
    if device.type == "cuda":
        of_each = (
            replace(each, micro_batches=[b.changed(Tensor.pin_memory) for b in each.micro_batches])
            for each in of_each
        )
    return Prefetched(of_each, _STEPS_AHEAD)
