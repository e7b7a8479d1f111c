"""What is far above what it was before: a loss, or the expansion stream beside the base stream."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW_STEPS = 64
# The spread of a few losses may be small by chance, so that more is asked of a leap above them.
_SETTLED_STEPS, _FEWEST_STEPS = 16, 3
_LEAST_SHARE, _LEAST_SHARE_OF_FEW = 0.1, 0.25
# A normal loss lies within 1.48 MAD of the median two times in three; this far out is one step in millions.
_TIMES_MAD = 8.0
# While losses fall steeply their spread is wide; half again above all of them is a leap all the same.
_TIMES_HIGHEST = 1.5
# Of rms(u) / rms(x), which grows by half from one record to the next while the rate is warmed up, and by a tenth later.
_TIMES_LARGEST = 2.0


class SpikeWatch:
    """Compares each loss with the median of the steps before it; nothing in a run depends on it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW_STEPS)

    def usual_loss_of_spike(self, loss: float) -> float | None:
        """Return the median loss so far where this one is a spike, None where it is not."""
        usual = None
        if len(self._losses) >= _FEWEST_STEPS:
            median = statistics.median(self._losses)
            spread = statistics.median(abs(earlier - median) for earlier in self._losses)
            share = _LEAST_SHARE if len(self._losses) >= _SETTLED_STEPS else _LEAST_SHARE_OF_FEW
            if loss > min(median + max(_TIMES_MAD * spread, share * median), _TIMES_HIGHEST * max(self._losses)):
                usual = median
        self._losses.append(loss)
        return usual


class StreamWatch:
    """Compares rms(u) / rms(x) of each layer with the largest that was recorded before; nothing in a run depends on it.

    One position's is enough to be seen, and is so some steps before the loss tells of it.
    """

    def __init__(self) -> None:
        self._largest: list[float] = []
        self._num_records = 0

    def leap(self, ratios: list[float]) -> tuple[int, float] | None:
        """Return the layer whose ratio has leapt most, and the largest that it had; None where none has leapt."""
        largest = self._largest or ratios
        times, layer = max(
            (ratio / (before or 1.0), i) for i, (ratio, before) in enumerate(zip(ratios, largest, strict=True))
        )
        settled = self._num_records >= _FEWEST_STEPS
        self._largest, self._num_records = list(map(max, largest, ratios)), self._num_records + 1
        return (layer, largest[layer]) if settled and times > _TIMES_LARGEST else None
