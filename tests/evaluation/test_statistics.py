from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import f1_score  # type: ignore[import-untyped]

from scale_cli.evaluation.statistics import (
    holm,
    macro_f1,
    means,
    paired_difference,
    paired_p,
    percentile_interval,
    resampled,
)
from scale_cli.report import Interval

Values = npt.NDArray[np.float64]


def interval(before: Values, after: Values, units: Values, *, num_resamples: int = 2000, seed: int = 0) -> Interval:
    return paired_difference(before, after, units, num_resamples=num_resamples, seed=seed)


def bounds(measured: Interval) -> tuple[float, float]:
    assert measured.low is not None and measured.high is not None
    return measured.low, measured.high


def bootstrap(before: Values, after: Values, units: Values, num_resamples: int) -> tuple[float, float]:
    """A percentile bootstrap over documents, written out."""
    rng = np.random.default_rng(99)
    ratios = []
    for _ in range(num_resamples):
        drawn = rng.integers(0, len(units), len(units))
        ratios.append((after[drawn].sum() - before[drawn].sum()) / units[drawn].sum())
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def documents(count: int, seed: int = 0) -> tuple[Values, Values, Values]:
    """Losses under two heads, and lengths; longer documents differ more, as real ones do."""
    rng = np.random.default_rng(seed)
    units = rng.integers(20, 400, count).astype(np.float64)
    before = units * rng.normal(3.0, 0.5, count)
    return before, before + units * rng.normal(0.2, 0.1, count) + rng.normal(0.0, 5.0, count), units


@pytest.mark.parametrize("count", [5, 60])
def test_the_interval_is_that_of_a_bootstrap_over_whole_documents(count: int) -> None:
    before, after, units = documents(count)
    measured = interval(before, after, units, num_resamples=4000)
    low, high = bounds(measured)
    expected_low, expected_high = bootstrap(before, after, units, 4000)
    width = expected_high - expected_low
    assert low == pytest.approx(expected_low, abs=0.08 * width)
    assert high == pytest.approx(expected_high, abs=0.08 * width)
    assert measured.value == pytest.approx((after.sum() - before.sum()) / units.sum())


def test_pairing_takes_out_what_documents_share() -> None:
    before, _, units = documents(60)
    low, high = bounds(interval(before, before + 0.1 * units, units))
    assert high - low < 1e-12
    assert low == pytest.approx(0.1)


def test_one_document_has_a_value_and_no_interval_and_equal_heads_differ_by_nothing() -> None:
    one = np.ones(1)
    assert interval(one, 3.0 * one, 2.0 * one) == Interval(1.0, None, None)
    before, _, units = documents(5)
    assert interval(before, before, units) == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_has_neither_value_nor_interval(broken: float) -> None:
    before, after, units = documents(5)
    after[2] = broken
    assert interval(before, after, units) == Interval(None, None, None)
    assert interval(before[:1], np.array([broken]), units[:1]) == Interval(None, None, None)


probabilities = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def correlated(seed: int, num_items: int, before: float, after: float, alike: float = 0.7) -> Any:
    """Right and wrong answers of two heads that agree on a share of the items because it is the same answer."""
    rng = np.random.default_rng(seed)
    first = (rng.random(num_items) < before).astype(np.float64)
    second = np.where(rng.random(num_items) < alike, first, rng.random(num_items) < after)
    return np.column_stack([first, second])


def scipy_interval(data: tuple[Any, ...], statistic: Any) -> tuple[float, float]:
    result = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(5),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def test_the_interval_of_an_accuracy_difference_is_scipys() -> None:
    outcomes = correlated(0, 150, 0.4, 0.55)
    drawn = resampled(outcomes, means, 20_000, np.random.default_rng(1))
    value = float(outcomes[:, 1].mean() - outcomes[:, 0].mean())
    interval = percentile_interval(value, drawn[:, 1] - drawn[:, 0], len(outcomes))
    expected = scipy_interval((outcomes[:, 1], outcomes[:, 0]), lambda a, b: a.mean() - b.mean())
    assert interval.value == value
    assert (interval.low, interval.high) == pytest.approx(expected, abs=0.012)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_macro_f1_is_sklearns_however_the_items_are_counted(pairs: list[tuple[int, int]]) -> None:
    expected = f1_score(*np.array(pairs).T, average="macro", zero_division=0.0)
    assert macro_f1(np.ones(len(pairs), dtype=np.int64), np.array(pairs)) == pytest.approx(expected)
    rows, counts = np.unique(pairs, axis=0, return_counts=True)
    assert macro_f1(counts, rows) == pytest.approx(expected)


def test_heads_that_answer_alike_differ_by_nothing_and_one_item_has_no_interval() -> None:
    outcomes = np.repeat(correlated(3, 50, 0.5, 0.5)[:, :1], 2, axis=1)
    drawn = resampled(outcomes, means, 500, np.random.default_rng(0))
    assert percentile_interval(0.0, drawn[:, 1] - drawn[:, 0], 50) == Interval(0.0, 0.0, 0.0)
    assert percentile_interval(1.0, np.ones(10), 1) == Interval(1.0, None, None)
    assert percentile_interval(math.nan, np.ones(10), 9) == Interval(None, None, None)


@given(st.integers(0, 40), st.integers(0, 40))
def test_right_and_wrong_answers_are_tested_by_a_fair_coin_counted_out(gained: int, lost: int) -> None:
    num_tosses = gained + lost
    at_most = sum(math.comb(num_tosses, heads) for heads in range(min(gained, lost) + 1))
    expected = min(Fraction(1), Fraction(2 * at_most, 2**num_tosses))
    before, after = np.array([[0, 1]] * gained + [[1, 0]] * lost + [[1, 1], [0, 0]], dtype=np.float64).T
    assert paired_p(before, after, np.random.default_rng(0)) == pytest.approx(float(expected))
    assert paired_p(after, before, np.random.default_rng(0)) == pytest.approx(float(expected))


def test_scores_in_between_are_tested_by_flipping_signs() -> None:
    rng = np.random.default_rng(6)
    before = rng.random(10)
    after = before + rng.normal(0.05, 0.1, 10)
    difference = after - before
    signs = np.array(np.meshgrid(*[[-1, 1]] * 10)).reshape(10, -1)
    flipped = difference @ signs / 10
    expected = float((np.abs(flipped) >= abs(difference.mean()) - 1e-12).mean())
    assert paired_p(before, after, rng) == pytest.approx(expected, abs=0.01)
    assert paired_p(before, np.full(10, math.nan), rng) is None


def adjusted(p_values: list[float]) -> list[float]:
    return [p for p in holm(p_values) if p is not None]


@given(probabilities)
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    for level in (0.01, 0.05, 0.2):
        rejected, remaining = set(), sorted(range(len(p_values)), key=lambda index: p_values[index])
        while remaining and p_values[remaining[0]] * len(remaining) <= level:
            rejected.add(remaining.pop(0))
        assert {index for index, p in enumerate(adjusted(p_values)) if p <= level} == rejected


def test_holm_on_a_case_worked_by_hand() -> None:
    assert holm([0.01, None, 0.04, 0.03, 0.005]) == [pytest.approx(p) for p in (0.03, None, 0.06, 0.06, 0.02)]
    assert holm([]) == []
