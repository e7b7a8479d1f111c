"""The law of mixtures is found again in losses that follow it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scale_cli.commands.mixture import BudgetLaw, PowerLaw, fit_budget_law, fit_power_law

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


@settings(deadline=None, max_examples=10)
@given(
    st.builds(
        BudgetLaw,
        *(st.floats(1.0, 3.0), st.floats(-1.0, 20.0), st.floats(0.1, 4.0), st.floats(0.1, 1.0)),
        *(st.floats(-0.1, 0.3), st.floats(0.02, 0.5), st.floats(0.1, 1.5), st.just(())),
    ),
    st.floats(0.15, 0.95),
    st.booleans(),
    st.booleans(),
)
def test_a_law_of_share_and_budget_is_recovered_at_a_longer_budget(
    law: BudgetLaw, unseen: float, few_budgets: bool, few_shares: bool
) -> None:
    shares, budgets = [0.0, 0.4, 1.0] if few_shares else [0.0, 0.1, 0.25, 0.5, 1.0], [20, 80]
    if few_shares:
        law = replace(law, e=0.01)
    if few_budgets:
        law = replace(law, b=0.28)
    else:
        budgets.append(40)
    places = list(product(shares, budgets))
    losses = [law.at(*place) for place in places]
    assume(min(losses) > 0.2)
    fitted = fit_budget_law([share for share, _ in places], [steps for _, steps in places], losses)
    assert fitted.assumed == ("b",) * few_budgets + ("e",) * few_shares
    assert fitted.at(unseen, 160) == pytest.approx(law.at(unseen, 160), rel=1e-2)
    for place, loss in zip(places, losses, strict=True):
        assert fitted.at(*place) == pytest.approx(loss, rel=2e-3)


def test_the_least_share_is_where_the_law_of_a_budget_meets_the_loss() -> None:
    law = BudgetLaw(E=1.0, B=-2.0, h=1.0, b=0.5, C=0.1, e=0.01, g=1.0, assumed=())
    share = law.least_share(law.at(0.3, 100), 100)
    assert share == pytest.approx(0.3, abs=1e-3)
    assert law.least_share(law.at(0.0, 100) + 1.0, 100) == 0.0
    assert law.least_share(law.at(1.0, 100) - 1.0, 100) is None
