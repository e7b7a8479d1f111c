from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scale_cli.evaluation.statistics import finite, paired_difference
from scale_cli.report.numbers import Interval

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


def test_of_normal_differences_the_interval_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(0.5, 2.0, 400)
    before = rng.normal(100.0, 30.0, 400)
    low, high = bounds(interval(before, before + differences, np.ones(400), num_resamples=4000))
    arm = 1.96 * differences.std(ddof=1) / 20.0
    assert low == pytest.approx(differences.mean() - arm, abs=0.1 * arm)
    assert high == pytest.approx(differences.mean() + arm, abs=0.1 * arm)


def test_pairing_takes_out_what_documents_share() -> None:
    before, _, units = documents(60)
    low, high = bounds(interval(before, before + 0.1 * units, units))
    assert high - low < 1e-12
    assert low == pytest.approx(0.1)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held, trials = 0, 200
    for trial in range(trials):
        before, after, units = documents(40, seed=trial)
        low, high = bounds(interval(before, after, units, num_resamples=300, seed=trial))
        held += low <= 0.2 <= high
    assert 0.88 <= held / trials <= 0.99


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float64, (2, 8), elements=st.floats(0.0, 1e4)),
    hnp.arrays(np.float64, 8, elements=st.integers(1, 1000).map(float)),
)
def test_bounds_enclose_nothing_but_what_documents_said(losses: Values, units: Values) -> None:
    measured = interval(losses[0], losses[1], units, num_resamples=200)
    low, high = bounds(measured)
    per_document = (losses[1] - losses[0]) / units
    slack = 1e-9 * (1.0 + np.abs(per_document).max())
    assert per_document.min() - slack <= low <= high <= per_document.max() + slack
    assert measured.value is not None
    assert per_document.min() - slack <= measured.value <= per_document.max() + slack


def test_the_same_seed_gives_the_same_interval_and_another_nearly_the_same() -> None:
    once, again, other = (interval(*documents(60), seed=seed) for seed in (0, 0, 1))
    assert once == again != other
    assert bounds(other) == pytest.approx(bounds(once), rel=0.1)


def test_exchanging_the_heads_turns_the_interval_round() -> None:
    before, after, units = documents(60)
    forth, back = interval(before, after, units), interval(after, before, units)
    assert bounds(back) == pytest.approx(tuple(-bound for bound in reversed(bounds(forth))))


def test_one_document_has_a_value_and_no_interval() -> None:
    one = np.ones(1)
    assert interval(one, 3.0 * one, 2.0 * one) == Interval(1.0, None, None)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_has_neither_value_nor_interval(broken: float) -> None:
    before, after, units = documents(5)
    after[2] = broken
    assert interval(before, after, units) == Interval(None, None, None)
    assert interval(before[:1], np.array([broken]), units[:1]) == Interval(None, None, None)


def test_equal_heads_differ_by_nothing() -> None:
    before, _, units = documents(5)
    assert interval(before, before, units) == Interval(0.0, 0.0, 0.0)


def test_finite_figures_stay_and_others_are_none() -> None:
    assert [finite(value) for value in (1.5, math.inf, -math.inf, math.nan)] == [1.5, None, None, None]
