from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.evaluation.results import bound_nats, guarantee
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.routing import log_prior, mix_log_probs, posterior_log_weights

priors = st.floats(1e-6, 1.0 - 1e-6)
losses = st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0)), min_size=1, max_size=12)


def cost(prior: float, losses_T: list[tuple[float, float]], head: int) -> float:
    """Nats that routing costs a document more than one head."""
    said_K1T = -torch.tensor(losses_T, dtype=torch.float64).T.unsqueeze(1)
    start_K = log_prior(prior)
    weights = posterior_log_weights(said_K1T, start_K)
    routed = mix_log_probs(weights[..., :-1], said_K1T)
    return float((said_K1T[head] - routed).sum())


@settings(deadline=None)
@given(priors, losses, st.sampled_from([0, 1]))
def test_no_document_costs_more_over_a_head_than_its_prior_says(
    prior: float, losses_T: list[tuple[float, float]], head: int
) -> None:
    bound = bound_nats((prior, 1.0 - prior)[head], 0.0)
    assert bound is not None
    assert cost(prior, losses_T, head) <= bound + 1e-9


@pytest.mark.parametrize(("prior", "head", "bound"), [(0.5, 0, 0.6931), (0.9, 0, 0.1054), (0.9, 1, 2.3026)])
def test_the_bound_is_reached_where_the_other_head_knows_nothing(prior: float, head: int, bound: float) -> None:
    wrong = [(0.0, 50.0), (50.0, 0.0)][head]
    assert cost(prior, [wrong] * 3, head) == pytest.approx(bound, abs=1e-4)
    assert bound_nats((prior, 1.0 - prior)[head], 0.0) == pytest.approx(bound, abs=1e-4)


def test_words_have_the_figures_of_the_router_and_nothing_is_said_where_nothing_holds() -> None:
    assert f"{math.log(2):.3f} nats over the better" in guarantee(RouterConfig())
    told = guarantee(RouterConfig(prior=0.9))
    assert "0.105 nats over the base head, nor than 2.303 over the trained one" in told
    assert "does not cover" in told
    assert guarantee(RouterConfig(switch_rate=0.01)) == guarantee(RouterConfig(rule="cosine")) == ""
    assert bound_nats(0.5, 0.01) is None
