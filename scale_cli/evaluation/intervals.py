"""Intervals and tests of paired figures: the bootstrap, McNemar's test, Holm's adjustment.

Shapes: N documents or items, R resamples, H heads, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from scale_cli.report import Interval

Values = npt.NDArray[np.float64]

_VALUES_AT_ONCE = 2**23  # numbers held at once, over all resamples of one batch
_SIGN_FLIPS = 9999


def finite(value: float) -> float | None:
    """Return a figure, or None if it is not finite (JSON has no infinity)."""
    return float(value) if math.isfinite(value) else None


def bootstrap(
    statistic: Callable[[Values], Values],
    num_drawn: int,
    *,
    num_resamples: int,
    rng: np.random.Generator,
) -> Values:
    """Return (R, ...), a statistic of resamples of N documents or items.

    `statistic` maps (R, N) counts, how often each resample drew each document, to (R, ...) figures.
    All heads share a resample, so the difficulty that they share cancels in a difference.
    """
    at_once = max(1, _VALUES_AT_ONCE // num_drawn)
    figures = []
    for first in range(0, num_resamples, at_once):
        size = (min(at_once, num_resamples - first), num_drawn)
        drawn_RN = rng.integers(num_drawn, size=size)
        counts_RN = [np.bincount(drawn_N, minlength=num_drawn) for drawn_N in drawn_RN]
        with np.errstate(invalid="ignore"):  # a loss that is not finite spoils its own column alone
            figures.append(statistic(np.stack(counts_RN).astype(np.float64)))
    return np.concatenate(figures)


def intervals_of(value_H: Values, drawn_RH: Values, num_drawn: int) -> list[Interval]:
    """Return figures with the middle 95 % of their resamples; one document has no interval."""
    found = []
    for value, drawn_R in zip(value_H, drawn_RH.T, strict=True):
        if num_drawn < 2 or not (np.isfinite(value) and np.isfinite(drawn_R).all()):
            found.append(Interval(finite(value), None, None))
            continue
        low, high = np.percentile(drawn_R, [2.5, 97.5])
        found.append(Interval(float(value), float(low), float(high)))
    return found


def paired_differences(
    before_N: Values,
    after_NH: Values,
    units_N: Values,
    *,
    num_resamples: int,
    seed: int,
) -> list[Interval]:
    """Return (sum after - sum before) / sum units of each column, with bootstrap intervals.

    Before and after are nats under two heads; units are tokens, or bytes times ln 2 for bits per
    byte. The interval is of the corpus-level figure (a ratio of sums), not of a mean of
    per-document figures.
    """
    with np.errstate(invalid="ignore"):  # of losses that are not finite
        columns_NC = np.column_stack([after_NH - before_N[:, None], units_N])

    def ratios(counts_RN: Values) -> Values:
        sums_RC = counts_RN @ columns_NC
        return sums_RC[:, :-1] / sums_RC[:, -1:]

    num_documents = len(units_N)
    rng = np.random.default_rng(seed)
    drawn_RH = bootstrap(ratios, num_documents, num_resamples=num_resamples, rng=rng)
    value_H = ratios(np.ones((1, num_documents)))[0]
    return intervals_of(value_H, drawn_RH, num_documents)


def paired_p(before_N: Values, after_N: Values, rng: np.random.Generator) -> float | None:
    """Return the p-value of a paired difference of scores; None if one is not finite.

    For items that are right or wrong, this is McNemar's exact test: a fair coin for every item on
    which the heads disagree. For scores in between (truthfulqa_mc2 gives a share of probability),
    the signs of the differences are flipped at random, which is the same test for such scores.
    """
    from scipy import stats

    difference_N = after_N - before_N
    if not np.isfinite(difference_N).all():
        return None
    if np.isin(difference_N, (-1.0, 0.0, 1.0)).all():
        gained = int((difference_N > 0).sum())
        differing = int((difference_N != 0).sum())
        return float(stats.binomtest(gained, differing, 0.5).pvalue) if differing else 1.0
    tested = stats.permutation_test(
        (difference_N,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_SIGN_FLIPS,
        batch=max(1, _VALUES_AT_ONCE // len(difference_N)),
        rng=rng,
    )
    return float(tested.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values; None stays None: not tested.

    Below 5 %, the chance of any false difference among them is at most 5 %. Source: Holm 1979, "A
    simple sequentially rejective multiple test procedure".
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        adjusted[index] = largest
    return adjusted
