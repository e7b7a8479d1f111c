"""Packing and mixing: which tokens stand in which batch, as a pure function of (seed, step, rank).

A source is one long stream of framed documents, cut into windows of T inputs; each window's targets are its inputs
shifted by one, across the cut, so every token but the stream's first is a target exactly once an epoch. The last window
is padded, and its padding is no target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORED = -100  # the target that torch's cross-entropy leaves out


class Windows(Protocol):
    """Sequences of one length to train on, padded where they are shorter."""

    def __len__(self) -> int:
        """Return how many there are."""

    def num_targets(self, index: int) -> int:
        """Return how many targets a window has."""

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a window's inputs and targets, both (T,); padding is input 0 and target IGNORED."""


class PackedWindows:
    """A token stream as windows of `sequence_length` inputs and as many targets."""

    def __init__(self, ids: npt.NDArray[np.integer], sequence_length: int) -> None:
        assert len(ids) >= 2, "a stream needs an input and a target"
        self.ids = ids
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.sequence_length)

    def num_targets(self, index: int) -> int:
        """Return how many targets a window has."""
        return min(self.sequence_length, len(self.ids) - 1 - index * self.sequence_length)

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a window's inputs and targets, both (T,); padding is input 0 and target IGNORED."""
        start, num_targets = index * self.sequence_length, self.num_targets(index)
        inputs = np.zeros(self.sequence_length, dtype=np.int64)
        targets = np.full(self.sequence_length, IGNORED, dtype=np.int64)
        inputs[:num_targets] = self.ids[start : start + num_targets]
        targets[:num_targets] = self.ids[start + 1 : start + num_targets + 1]
        return inputs, targets


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes.

    Args:
        input_ids: (micro_batch_size, T).
        targets: (micro_batch_size, T), IGNORED where there is none.
    """

    input_ids: Tensor
    targets: Tensor


class Batches:
    """All batches of a run.

    Sample n of the run (0 is the first sequence of step 0) comes from a source drawn by weight; the k-th sample drawn
    from a source is the k-th window of that source's epochs, each epoch in its own order. Nothing depends on the number
    of processes, so the global batch of a step is the same on one device and on eight.

    Args:
        sources: the windows of each source.
        weights: each source's share of the samples, relative to the others.
        seed: decides draws and orders.
        num_steps: how many steps will be asked for; a longer run begins with the same batches.
        global_batch_size: sequences a step.
        micro_batch_size: sequences a process holds at once.
    """

    def __init__(
        self,
        sources: Sequence[Windows],
        weights: list[float],
        *,
        seed: int,
        num_steps: int,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> None:
        self.sources = sources
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        num_samples = num_steps * global_batch_size
        bounds = np.cumsum(weights) / np.sum(weights)
        draws = np.random.default_rng([seed, 0]).random(num_samples)
        # A draw rounds to 1.0 at the most; the last bound may lie a rounding below it.
        self._source_of = np.minimum(np.searchsorted(bounds, draws, side="right"), len(sources) - 1).astype(np.uint16)
        self._turn_of = np.zeros(num_samples, dtype=np.int64)
        for index in range(len(sources)):
            mine = self._source_of == index
            self._turn_of[mine] = np.arange(mine.sum())
        self._epoch_order = lru_cache(maxsize=2 * len(sources))(self._shuffled)

    def _shuffled(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, 1, source, epoch]).permutation(len(self.sources[source]))

    def _locate(self, sample: int) -> tuple[int, int]:
        source, turn = int(self._source_of[sample]), int(self._turn_of[sample])
        epoch, position = divmod(turn, len(self.sources[source]))
        return source, int(self._epoch_order(source, epoch)[position])

    def _samples(self, step: int) -> range:
        return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)

    def windows_of(self, step: int) -> list[tuple[int, int]]:
        """Return (source, window) for every sequence of a step's global batch."""
        return [self._locate(sample) for sample in self._samples(step)]

    def num_target_tokens(self, step: int) -> int:
        """Return the targets in a step's global batch, over all processes: what its loss is normalised by."""
        return sum(self.sources[source].num_targets(window) for source, window in self.windows_of(step))

    def micro_batches(self, step: int, rank: int = 0, num_processes: int = 1) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one process in one step (steps count from 0)."""
        samples = self._samples(step)
        for start in range(0, self.global_batch_size, self.micro_batch_size * num_processes):
            first = start + rank * self.micro_batch_size
            located = [self._locate(sample) for sample in samples[first : first + self.micro_batch_size]]
            windows = [self.sources[source].window(window) for source, window in located]
            inputs, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*windows, strict=True))
            yield MicroBatch(inputs, targets)
