"""Which windows of a source are trained on, by a score each (`corpus.sources[].select`).

The scores are the base's losses, or those of an n-gram model of the source's own text, in nats per target. That model
has orders 1 to 3, each with the one below as its prior (MacKay and Peto 1995), and leaves out the occurrence that it
scores, so that rare text is not made likely by itself. Its counts are hashed into tables of one size, whatever the
text's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scale_cli.config.sources import SelectConfig
from scale_cli.data.batches import IGNORED, Windows

Scores = npt.NDArray[np.float64]
_ORDERS, _TABLE = 3, 1 << 22
_SHIFT, _MULTIPLIER = np.uint64(64 - 22), np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing (Knuth)
_PRIOR = 5.0  # occurrences that the order below counts for


class ChosenWindows(Windows):
    """Some of a source's windows."""

    def __init__(self, windows: Windows, chosen: npt.NDArray[np.int64]) -> None:
        self.windows = windows
        self.chosen = chosen
        self.sequence_length = windows.sequence_length
        self.num_targets = windows.num_targets[chosen]
        self.num_left_out = int(windows.num_targets.sum() - self.num_targets.sum())

    @property
    def described(self) -> str:
        """How many there are."""
        return f"{len(self):,} of {len(self.windows):,} windows, {self.num_left_out:,} targets left out"

    @property
    def sha256(self) -> str:
        """Of which windows are chosen."""
        return hashlib.sha256(self.chosen.astype("<i8").tobytes()).hexdigest()

    def positions(self, index: int) -> npt.NDArray[np.int64] | None:
        return self.windows.positions(int(self.chosen[index]))

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.windows.window(int(self.chosen[index]))


def chosen_windows(select: SelectConfig, windows: Windows, scores: Scores) -> ChosenWindows:
    """Return what is trained on of a source, by the scores of its windows."""
    num_scored = int(np.isfinite(scores).sum())  # what has no target has no score, and is last
    number = max(1, round(select.keep * num_scored))
    first = {"low": 0, "middle": (num_scored - number) // 2, "high": num_scored - number}[select.side]
    return ChosenWindows(windows, np.sort(np.argsort(scores, kind="stable")[first : first + number]))


def ngram_scores(windows: Windows, vocab_size: int) -> Scores:
    """Return the loss of every window by an n-gram model of all of them; infinite where it has no target."""
    counts, contexts = (np.zeros((_ORDERS, _TABLE), dtype=np.int32) for _ in range(2))
    for index in range(len(windows)):
        for order, (grams, before) in enumerate(_grams(windows, index)):
            np.add.at(counts[order], grams, 1)
            np.add.at(contexts[order], before, 1)
    return np.array([_loss(windows, index, counts, contexts, vocab_size) for index in range(len(windows))])


def _loss(
    windows: Windows, index: int, counts: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32], vocab_size: int
) -> float:
    """Return a window's mean loss: of an order (c(h w) - 1 + k p) / (c(h) - 1 + k), p being the order below's."""
    probabilities = np.array([])
    for order, (grams, before) in enumerate(_grams(windows, index)):
        lower = probabilities[len(probabilities) - len(grams) :] if order else np.full(len(grams), 1.0 / vocab_size)
        there = counts[order][grams] - 1 + _PRIOR * lower, contexts[order][before] - 1 + _PRIOR
        # A window's first targets have no longer context in it.
        probabilities = np.concatenate([probabilities[: len(probabilities) - len(grams)], there[0] / there[1]])
    return float(-np.log(probabilities).mean()) if len(probabilities) else np.inf


def _grams(windows: Windows, index: int) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
    """Yield, for every order, the places in the tables of what ends with a window's targets, and of what is before."""
    window = windows.window(index)
    inputs, targets = (row.astype(np.uint64) for row in window)
    learned = window[1] != IGNORED
    context = np.zeros(len(inputs), dtype=np.uint64)
    for order in range(_ORDERS):
        first = max(order - 1, 0)  # the targets before it have too little before them
        if order:
            earlier = np.concatenate([np.zeros(first, dtype=np.uint64), inputs[: len(inputs) - first]])
            context = (context + earlier + np.uint64(1)) * _MULTIPLIER
        chosen = np.flatnonzero(learned[first:]) + first
        grams = (context + targets + np.uint64(1)) * _MULTIPLIER
        yield grams[chosen] >> _SHIFT, context[chosen] >> _SHIFT
