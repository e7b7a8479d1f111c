"""The law of mixtures is found again in losses that follow it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scale_cli.planning.mixture_law import PowerLaw, fit_power_law

RATIOS = [0.1, 0.25, 0.5, 0.75, 1.0]


@settings(deadline=None, max_examples=15)
@given(st.floats(0.05, 2.0), st.floats(0.2, 6.0), st.booleans(), st.floats(0.5, 3.0), st.floats(0.12, 0.95))
def test_a_law_is_recovered_from_its_own_losses(a: float, s: float, falls: bool, b: float, unseen: float) -> None:
    law = PowerLaw(a, -s / 4 if falls else s, b)
    fitted = fit_power_law(RATIOS, [law.at(ratio) for ratio in RATIOS])
    assert fitted.at(unseen) == pytest.approx(law.at(unseen), rel=2e-3)
    for ratio in RATIOS:
        assert fitted.at(ratio) == pytest.approx(law.at(ratio), rel=1e-3)


@given(st.floats(0.05, 2.0), st.floats(0.2, 6.0), st.floats(0.5, 3.0), st.floats(0.01, 1.0))
def test_the_largest_ratio_is_where_the_law_meets_the_loss(a: float, s: float, b: float, ratio: float) -> None:
    law = PowerLaw(a, s, b)
    assume(a * ratio**s > 1e-6)
    assert law.largest_ratio(law.at(ratio)) == pytest.approx(ratio, rel=1e-3)
    assert law.largest_ratio(law.at(1.0) + 1.0) == 1.0
    assert law.largest_ratio(b - 0.1) is None


def test_losses_that_do_not_depend_on_the_ratio_are_a_law_too() -> None:
    fitted = fit_power_law(RATIOS, [1.5] * 5)
    assert all(fitted.at(ratio) == pytest.approx(1.5, rel=1e-6) for ratio in RATIOS)
    assert fitted.largest_ratio(1.55) == 1.0
