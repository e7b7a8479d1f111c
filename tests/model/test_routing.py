import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from scale_cli.model.routing import (
    cosine_serves_base,
    log_prior,
    logit_cosine,
    mix_log_probs,
    mix_logits,
    observed_log_probs,
    posterior_log_weights,
)

Values = npt.NDArray[np.float64]
BROKEN = (-math.inf, math.nan)

unhurried = settings(max_examples=100)


@dataclass(frozen=True)
class Said:
    """What both heads gave the tokens of one document, and the base's prior."""

    log_probs_KT: Values
    base_prior: float

    @property
    def prior_K(self) -> Tensor:
        return log_prior(self.base_prior)

    def weights(self) -> Tensor:
        """(K, T + 1), logarithms."""
        log_probs_KBT = torch.from_numpy(self.log_probs_KT).unsqueeze(1)
        return posterior_log_weights(log_probs_KBT, self.prior_K)[:, 0]

    def head_losses(self) -> list[float]:
        return [float(loss) for loss in -_zero_for_nan(self.log_probs_KT).sum(axis=1)]


def _zero_for_nan(log_probs: Values) -> Values:
    return np.where(np.isnan(log_probs), -np.inf, log_probs)


@st.composite
def documents(draw: st.DrawFn) -> Said:
    num_tokens = draw(st.integers(1, 30))
    finite = st.floats(-60.0, 0.0)
    of_head = hnp.arrays(np.float64, num_tokens, elements=finite | st.sampled_from(BROKEN))
    of_head |= hnp.arrays(np.float64, num_tokens, elements=finite)
    log_probs = [draw(of_head) for _ in range(2)]
    return Said(np.stack(log_probs), draw(st.floats(1e-6, 1.0 - 1e-6)))


def recursion(said: Said) -> Values:
    """Bayes' rule one token at a time; probabilities (K, T + 1)."""
    # In float64 a head's weight falls to zero after a dozen bad tokens, and no later one could
    # bring it back.
    prior = np.exp(said.prior_K.numpy().astype(np.longdouble))
    weights = prior
    columns = [weights]
    for token in _zero_for_nan(said.log_probs_KT).T:
        if np.isneginf(token).all():
            token = np.zeros_like(token)
        with np.errstate(divide="ignore"):
            joint = np.log(weights) + token
        if np.isneginf(joint).all():
            weights = prior
        else:
            weights = np.exp(joint - joint.max())
            weights = weights / weights.sum()
        columns.append(weights)
    return np.stack(columns, axis=1).astype(np.float64)


@unhurried
@given(documents())
def test_weights_are_those_of_a_step_by_step_recursion(said: Said) -> None:
    np.testing.assert_allclose(said.weights().exp().numpy(), recursion(said), atol=1e-10)


@unhurried
@given(documents(), st.data())
def test_windows_with_carried_weights_are_the_whole_document(
    said: Said, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, said.log_probs_KT.shape[1]))
    log_probs_KBT = torch.from_numpy(said.log_probs_KT).unsqueeze(1)
    start_KB = said.prior_K[:, None]
    windows = []
    for window in (log_probs_KBT[..., :cut], log_probs_KBT[..., cut:]):
        weights_KBS = posterior_log_weights(window, said.prior_K, start_KB)
        start_KB = weights_KBS[..., -1]
        windows.append(weights_KBS[:, 0, :-1])
    whole = said.weights()
    torch.testing.assert_close(
        torch.cat([*windows, start_KB], dim=-1).exp(), whole.exp(), rtol=0.0, atol=1e-10
    )


@settings(unhurried, max_examples=200)
@given(st.lists(documents(), min_size=1, max_size=4))
def test_routing_loses_at_most_the_prior_to_every_head_of_every_document_of_a_batch(
    batch: list[Said],
) -> None:
    """So it is finite where any head is."""
    shortest = min(said.log_probs_KT.shape[1] for said in batch)
    batch = [Said(said.log_probs_KT[:, :shortest], said.base_prior) for said in batch]
    log_probs_KBT = torch.from_numpy(np.stack([said.log_probs_KT for said in batch], axis=1))
    priors_B = torch.tensor([said.base_prior for said in batch], dtype=torch.float64)
    prior_KB = log_prior(priors_B)
    weights_KBS = posterior_log_weights(log_probs_KBT, prior_KB)
    routed_B = -mix_log_probs(weights_KBS[..., :-1], log_probs_KBT).sum(dim=-1)
    for said, routed, weights_KS in zip(batch, routed_B, weights_KBS.unbind(1), strict=True):
        torch.testing.assert_close(weights_KS.exp(), said.weights().exp(), rtol=0.0, atol=1e-10)
        assert float(routed) >= -1e-9
        for loss, prior in zip(said.head_losses(), said.prior_K.tolist(), strict=True):
            assert float(routed) <= loss - prior + 1e-9 * (1.0 + abs(loss))


@unhurried
@given(st.floats(1e-6, 1.0 - 1e-6))
def test_the_prior_is_the_bases_share_and_the_rest(base_prior: float) -> None:
    assert log_prior(base_prior).exp().tolist() == pytest.approx([base_prior, 1.0 - base_prior])


@unhurried
@given(
    hnp.arrays(np.float32, (4, 7), elements=st.floats(-50.0, 50.0, width=32)),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 6), st.sampled_from([math.nan, math.inf, -math.inf])
        )
    ),
    st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
def test_the_token_that_came_is_given_what_the_whole_distribution_gives_it(
    logits: npt.NDArray[np.float32], damage: list[tuple[int, int, float]], came: list[int]
) -> None:
    for row, column, value in damage:
        logits[row, column] = value
    logits_BTV = torch.from_numpy(logits).unsqueeze(0)
    next_ids_BT = torch.tensor([came])
    said = observed_log_probs(logits_BTV, next_ids_BT)
    whole = logits_BTV.log_softmax(-1).gather(-1, next_ids_BT.unsqueeze(-1)).squeeze(-1)
    broken = (
        torch.isnan(logits_BTV).any(-1)
        | (logits_BTV == torch.inf).any(-1)
        | (logits_BTV == -torch.inf).all(-1)
    )
    assert (said[broken] == -torch.inf).all()
    torch.testing.assert_close(said[~broken], whole[~broken], rtol=1e-5, atol=1e-5)


@unhurried
@given(documents())
def test_a_mixture_is_the_weighted_mean_of_probabilities(said: Said) -> None:
    weights = said.weights()[:, :-1]
    mixed = mix_log_probs(weights, torch.from_numpy(said.log_probs_KT)).exp().numpy()
    expected = (weights.exp().numpy() * np.exp(_zero_for_nan(said.log_probs_KT))).sum(axis=0)
    np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-300)


@unhurried
@given(
    hnp.arrays(np.float32, (2, 4, 7), elements=st.floats(-50.0, 50.0, width=32)),
    hnp.arrays(np.float64, (2, 4), elements=st.floats(1e-3, 1.0)),
    st.sets(st.integers(0, 1), max_size=1),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_scores_of_a_mixture_have_its_distribution_and_the_mean_size_of_the_logits_of_the_heads_that_are_sound(
    logits: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float64],
    broken: set[int],
    value: float,
) -> None:
    sound = [head for head in range(2) if head not in broken]
    for head in broken:
        logits[head, :, slice(None) if value == -math.inf else 3] = value
    scores = mix_logits(torch.from_numpy(weights).log(), torch.from_numpy(logits)).double()
    shares = torch.from_numpy(weights[sound] / weights[sound].sum(0))
    heads = torch.from_numpy(logits[sound]).double()
    expected = (shares.unsqueeze(-1) * heads.softmax(-1)).sum(0)
    torch.testing.assert_close(scores.softmax(-1), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        scores.logsumexp(-1), (shares * heads.logsumexp(-1)).sum(0), rtol=1e-5, atol=1e-4
    )


def test_a_head_gone_astray_does_not_round_away_what_another_says() -> None:
    good = torch.randn(5, 61, generator=torch.Generator().manual_seed(0))
    scores = mix_logits(
        torch.tensor([0.5, 0.5])[:, None].expand(2, 5).log(), torch.stack([good, good * 1e12])
    )
    expected = 0.5 * (good.softmax(-1) + (good * 1e12).softmax(-1))
    torch.testing.assert_close(scores.softmax(-1), expected, rtol=1e-4, atol=1e-6)


def test_the_cosine_is_torchs() -> None:
    base, trained = torch.randn(2, 5, 61, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        logit_cosine(base, trained), F.cosine_similarity(base, trained, dim=-1)
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0])
def test_where_there_is_no_cosine_the_base_is_served(broken: float) -> None:
    base = torch.randn(3, 61, generator=torch.Generator().manual_seed(0))
    cosine = logit_cosine(base, torch.full_like(base, broken))
    assert torch.isnan(cosine).all()
    for threshold in (-1.0, 0.5, 1.0):
        assert cosine_serves_base(cosine, threshold).all()


@unhurried
@given(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_the_papers_rule_serves_the_base_from_the_threshold_up(
    cosine: float, threshold: float
) -> None:
    served = cosine_serves_base(torch.tensor(cosine, dtype=torch.float64), threshold)
    assert served.item() is (cosine >= threshold)
