"""How sure a difference between two heads is: on the same documents, and on the same benchmark items.

Documents and items are resampled whole, so what the heads share of their difficulty cancels in the difference.
An item's outcome is one row: a column for each head. Outcomes repeat (right or wrong, four heads: sixteen rows), and n
draws with replacement from n items are, counted by distinct row, one draw of a multinomial: the very same bootstrap, at
a cost that does not grow with the number of items.

Shapes: N documents or items, H heads, C columns, U distinct rows, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from scale_cli.report import Interval

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
# Of how often each distinct row occurs (..., U), and those rows (U, C): a figure of each head (..., H).
Statistic = Callable[[Indices, Values], Values]

# Numbers held at once, over all resamples of one batch.
_VALUES_AT_ONCE = 2**23
_SIGN_FLIPS = 9999


def finite(value: float) -> float | None:
    """Return a figure, or None where it is not finite (JSON has no infinity)."""
    return float(value) if math.isfinite(value) else None


def paired_difference(before_N: Values, after_N: Values, units_N: Values, *, num_resamples: int, seed: int) -> Interval:
    """Return (sum after - sum before) / sum units, with its paired bootstrap interval over documents.

    Of nats under two heads; units are tokens, or bytes times ln 2 for bits per byte. The interval holds for the
    corpus-level figure (a ratio of sums), not for a mean of per-document ones.
    """
    from scipy import stats  # takes half a second to import

    difference_N = after_N - before_N
    value = float(difference_N.sum() / units_N.sum())
    if len(units_N) < 2 or not np.isfinite(difference_N).all():
        return Interval(finite(value), None, None)

    def ratio(numerator: Values, denominator: Values, axis: int) -> Values:
        return numerator.sum(axis=axis) / denominator.sum(axis=axis)

    result = stats.bootstrap(
        (difference_N, units_N),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, _VALUES_AT_ONCE // len(units_N)),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(value, float(low), float(high))


def resampled(rows_NC: Values, statistic: Statistic, num_resamples: int, rng: np.random.Generator) -> Values:
    """Return (R, H): the heads' figure over items drawn with replacement, the same items for every head."""
    rows_UC, counts_U = np.unique(rows_NC, axis=0, return_counts=True)
    num_items, at_once = len(rows_NC), max(1, _VALUES_AT_ONCE // len(counts_U))
    sizes = [min(at_once, num_resamples - first) for first in range(0, num_resamples, at_once)]
    return np.concatenate(
        [statistic(rng.multinomial(num_items, counts_U / num_items, size=size), rows_UC) for size in sizes]
    )


def means(counts: Indices, scores_UH: Values) -> Values:
    """Return (..., H), the heads' mean scores, where `counts` (..., U) says how often each row occurs."""
    return counts @ scores_UH / counts.sum(axis=-1, keepdims=True)


def macro_f1(counts: Indices, classes_UC: Values) -> Values:
    """Return (..., H), the heads' means over classes of F1 = 2 tp / (2 tp + fp + fn).

    A row is the right class and every head's. A class that neither side names does not count.
    """
    gold_U1, said_UH = classes_UC[:, :1], classes_UC[:, 1:]
    total, num_classes = np.zeros(()), np.zeros(())
    for label in np.unique(classes_UC):
        is_gold, is_said = gold_U1 == label, said_UH == label
        named = counts @ is_gold + counts @ is_said
        total = total + 2.0 * (counts @ (is_gold & is_said)) / np.maximum(named, 1)
        num_classes = num_classes + (named > 0)
    return total / num_classes


def percentile_interval(value: float, resampled_R: Values, num_items: int) -> Interval:
    """Return a figure with the middle 95 % of its resampled values; without them where one item says nothing of it."""
    if num_items < 2 or not np.isfinite(value) or not np.isfinite(resampled_R).all():
        return Interval(finite(value), None, None)
    low, high = np.percentile(resampled_R, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def paired_p(before_N: Values, after_N: Values, rng: np.random.Generator) -> float | None:
    """Return the p-value of a paired difference of scores; None where one is not finite.

    McNemar's exact test where items are right or wrong: a fair coin for every item on which the heads disagree. Where
    they score in between (truthfulqa_mc2 gives a share of probability), random sign flips of the differences, which is
    the same test for such scores.
    """
    from scipy import stats

    difference_N = after_N - before_N
    if not np.isfinite(difference_N).all():
        return None
    if np.isin(difference_N, (-1.0, 0.0, 1.0)).all():
        gained, differing = int((difference_N > 0).sum()), int((difference_N != 0).sum())
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
    """Return p-values adjusted so that, over all of them together, a false difference is shown in at most 5 % of cases.

    None stands where nothing was tested. Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        adjusted[index] = largest = max(largest, min(1.0, (len(tested) - rank) * p))
    return adjusted
