"""Sequences that each stand in a window of their own, padded to the longest: questions and answers, biographies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scale_cli.data.batches import IGNORED


class SequenceWindows:
    """Token sequences, one a window; every token but a sequence's first is a target."""

    in_order = False
    num_left_out = 0

    def __init__(self, sequences: list[list[int]], longest: int = 0) -> None:
        assert sequences and min(map(len, sequences)) >= 2, "a sequence needs an input and a target"
        self.sequences = sequences
        self.sequence_length = max(longest, max(map(len, sequences))) - 1

    @classmethod
    def alike(cls, sources: list[list[list[int]]]) -> list[SequenceWindows]:
        """Return several sources' windows, as long as the longest of any."""
        longest = max(len(sequence) for sequences in sources for sequence in sequences)
        return [cls(sequences, longest) for sequences in sources]

    def __len__(self) -> int:
        return len(self.sequences)

    def num_targets(self, index: int) -> int:
        """Return how many targets a window has."""
        return len(self.sequences[index]) - 1

    def num_targets_of(self, indices: npt.NDArray[np.int64]) -> int:
        """Return how many targets some windows have together."""
        return sum(self.num_targets(int(index)) for index in indices)

    def window(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a window's inputs and targets, both (T,); padding is input 0 and target IGNORED."""
        sequence, num_targets = self.sequences[index], self.num_targets(index)
        inputs = np.zeros(self.sequence_length, dtype=np.int64)
        targets = np.full(self.sequence_length, IGNORED, dtype=np.int64)
        inputs[:num_targets], targets[:num_targets] = sequence[:-1], sequence[1:]
        return inputs, targets

    def positions(self, index: int) -> npt.NDArray[np.int64] | None:
        """Return None: a window holds one sequence."""
        del index
        return None
