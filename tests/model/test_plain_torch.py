"""Every head and every gradient, held to another implementation: `tests/plain_torch.py`, which shares no code."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.test_expansion_scale import ISOLATED
from tests.model.test_families import BASES, IDS, tiny
from tests.plain_torch import Added, logits_of, path_of
from tests.widening import as_if_trained, joined, routed_heads, trained_upon, widen

DOCUMENTS = (ISOLATED == 0).cumsum(1)
families = pytest.mark.parametrize("family", BASES)


def tensors_of(module: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@families
@torch.no_grad()
def test_of_siblings_and_children_every_head_says_what_plain_torch_says(family: str) -> None:
    base: Any = tiny(family)
    reads = trained_upon(base, "preserve", seed=1)
    writes = trained_upon(base, "adapt", "top:2", seed=2)
    upon_reads = trained_upon(reads, "route", ratio=1.0, seed=3)
    upon_writes = trained_upon(writes, "preserve", seed=4)
    parents = {
        "reads": (0, reads),
        "writes": (0, writes),
        "upon_reads": (1, upon_reads),
        "upon": (2, upon_writes),
    }
    model = joined(base, **parents)
    added = [Added(parent, tensors_of(run.expansion)) for parent, run in parents.values()]
    for head, logits in enumerate(routed_heads(model, IDS)):
        expected = logits_of(base.config, tensors_of(base), path_of(added, head), IDS)
        torch.testing.assert_close(logits.double(), expected, rtol=0.0, atol=1e-4)


@families
@pytest.mark.parametrize("upon_another", [False, True])
def test_of_isolated_documents_a_gradient_is_plain_autograds_through_all_of_it(
    family: str, upon_another: bool
) -> None:
    base: Any = tiny(family)
    model: Any = as_if_trained(widen(base, "adapt", ratio=0.5), seed=2)
    below = []
    if upon_another:
        below = [Added(0, tensors_of(model.expansion))]
        model = as_if_trained(widen(model.requires_grad_(False), "preserve", ratio=0.5), seed=3)
    model.train()
    targets = IDS.roll(-1, dims=1).masked_fill(ISOLATED > 17, -100)
    loss = model(input_ids=IDS, labels=targets, shift_labels=targets, position_ids=ISOLATED).loss
    loss.backward()
    leaves = {
        name: tensor.double().requires_grad_()
        for name, tensor in tensors_of(model.expansion).items()
    }
    logits = logits_of(
        base.config, tensors_of(base), [*below, Added(len(below), leaves)], IDS, DOCUMENTS
    )
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=0.0, atol=1e-5)
    for name, parameter in model.expansion.named_parameters():
        wanted = leaves[name].grad
        assert wanted is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-5, msg=name)
