"""Intervals: how sure a difference between two heads on the same documents is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scale_cli.report.numbers import Interval

Values = npt.NDArray[np.float64]

# Resampled values held at once, over all documents of one batch of resamples.
_VALUES_AT_ONCE = 2**23


def finite(value: float) -> float | None:
    """Return a figure, or None where it is not finite (JSON has no infinity)."""
    return float(value) if math.isfinite(value) else None


def paired_difference(before: Values, after: Values, units: Values, *, num_resamples: int, seed: int) -> Interval:
    """Return (sum after - sum before) / sum units, with its paired bootstrap interval over documents.

    Documents are resampled whole, each with both its losses and its length, so the interval holds for the corpus-level
    figure (a ratio of sums), not for a mean of per-document ones.

    Args:
        before: (documents,) nats under the base head.
        after: (documents,) nats under the other head.
        units: (documents,) tokens, or bytes times ln 2 for bits per byte.
        num_resamples: bootstrap resamples.
        seed: of the resampling.
    """
    from scipy import stats  # takes half a second to import, and only this needs it

    difference = after - before
    value = float(difference.sum() / units.sum())
    if len(units) < 2 or not np.isfinite(difference).all():
        return Interval(finite(value), None, None)

    def ratio(numerator: Values, denominator: Values, axis: int) -> Values:
        sums: Values = numerator.sum(axis=axis) / denominator.sum(axis=axis)
        return sums

    result = stats.bootstrap(
        (difference, units),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, _VALUES_AT_ONCE // len(units)),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(value, float(low), float(high))
