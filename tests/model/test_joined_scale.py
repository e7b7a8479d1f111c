"""The ensemble of a joined model: what its mean costs, and what routing it costs."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import log_probs_of
from scale_cli.model.joined_scale import mean_logits
from scale_cli.model.routing import mix_log_probs


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**31),
    st.integers(2, 5),
    st.integers(1, 20),
    st.floats(0.02, 0.98),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.sampled_from([None, math.nan, math.inf]),
)
def test_a_mean_costs_no_token_more_than_its_heads_on_average_and_routed_no_document_more_than_its_bound(
    seed: int, num_heads: int, length: int, prior: float, scale: float, broken: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, *members = scale * torch.randn(num_heads + 1, 2, length, 11, generator=generator).double()
    ids = torch.randint(0, 11, (2, length), generator=generator)
    if broken is not None:
        members[0][0, -1, 3] = broken
    mean = mean_logits(members)
    said = log_probs_of(lambda at: [base[:, at], mean[:, at]], ids, 11)
    routed_BT = mix_log_probs(said.log_weights("posterior", RouterConfig(prior=prior)), said.log_probs_KBT)
    of_members = torch.stack([one.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for one in members])
    if broken is None:
        assert (said.log_probs_KBT[1] >= of_members.mean(0) - 1e-4).all()
    for of_head, weight in zip(said.log_probs_KBT, (prior, 1.0 - prior), strict=True):
        assert (routed_BT.sum(-1) >= of_head.sum(-1) + math.log(weight) - 1e-3).all()
