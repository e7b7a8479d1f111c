"""Every head and every gradient, held to another implementation: `tests/plain_torch.py`, which
shares no code.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.test_expansion_scale import ISOLATED
from tests.model.test_families import BASES, IDS, tiny
from tests.plain_torch import logits_of
from tests.widening import as_if_trained, routed_heads, trained_on, widen

DOCUMENTS = (ISOLATED == 0).cumsum(1)
families = pytest.mark.parametrize("family", BASES)


def tensors_of(module: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@families
@torch.no_grad()
def test_every_head_says_what_plain_torch_says(family: str) -> None:
    base = tiny(family)
    for run in (
        trained_on(base, "preserve", seed=1),
        trained_on(base, "adapt", "top:2", seed=2),
    ):
        for logits, added in zip(
            routed_heads(run, IDS), (None, tensors_of(run.expansion)), strict=True
        ):
            expected = logits_of(base.config, tensors_of(base), added, IDS)
            torch.testing.assert_close(logits.double(), expected, rtol=0.0, atol=1e-4)


@families
@pytest.mark.parametrize("variant", ["adapt", "preserve"])
def test_of_isolated_documents_a_gradient_is_plain_autograds_through_all_of_it(
    family: str, variant: str
) -> None:
    base = tiny(family)
    model = as_if_trained(widen(base, variant, ratio=0.5), seed=2).train()
    targets = IDS.roll(-1, dims=1).masked_fill(ISOLATED > 17, -100)
    loss = model(input_ids=IDS, labels=targets, shift_labels=targets, position_ids=ISOLATED).loss
    loss.backward()
    leaves = {
        name: tensor.double().requires_grad_()
        for name, tensor in tensors_of(model.expansion).items()
    }
    logits = logits_of(base.config, tensors_of(base), leaves, IDS, DOCUMENTS)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=0.0, atol=1e-5)
    for name, parameter in model.expansion.named_parameters():
        wanted = leaves[name].grad
        assert wanted is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-5, msg=name)
