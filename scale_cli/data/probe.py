"""Text of what the base knows, as a method measures on it: the same windows for a seed, whoever asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from scale_cli.data.batches import MicroBatch, Windows


def known_windows(sources: Sequence[Windows], seed: int, num_windows: int) -> list[MicroBatch]:
    """Return some windows of every source of what the base knows, each by itself.

    Args:
        sources: the windows of those sources, in order.
        seed: decides which.
        num_windows: of each.
    """
    probe = []
    for index, windows in enumerate(sources):
        order = np.random.default_rng([seed, 2, index]).permutation(len(windows))
        for window in order[:num_windows]:
            positions = windows.positions(window)
            inputs, targets = (torch.from_numpy(row).unsqueeze(0) for row in windows.window(window))
            placed = None if positions is None else torch.from_numpy(positions).unsqueeze(0)
            probe.append(MicroBatch(inputs, targets, torch.tensor([index]), placed))
    return probe
