"""Several expansions on one base, and expansion upon expansion: what is below never changes, and one forward serves."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_cli.config.schema import ModelConfig
from scale_cli.model.heads import token_log_probs
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import mix_log_probs, posterior_log_weights
from scale_cli.upscale.base import changed_tensors, record_base
from tests.model.test_families import BASES, tiny
from tests.widening import as_if_trained, joined, tiny_llama, train_steps, widen

IDS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
# Variant and collaborating layers of two siblings: reading only, writing in some layers, writing from the bottom.
SIBLINGS = [
    (("preserve", None), ("route", "none")),
    (("preserve", None), ("adapt", "top:1")),
    (("route", "top:2"), ("adapt", None)),
]
PARENTS = [("preserve", None), ("route", "top:1"), ("adapt", None)]
siblings = pytest.mark.parametrize(("one", "other"), SIBLINGS)
parents = pytest.mark.parametrize("parent", PARENTS)


def sibling(base: PreTrainedModel, method: tuple[Any, Any], seed: int, ratio: float = 0.5) -> ScaleForCausalLM:
    """A widened copy of a base, as if it had been trained by itself."""
    return as_if_trained(widen(copy.deepcopy(base), *method, ratio=ratio), seed=seed)


@torch.no_grad()
def logits_alone(model: ScaleForCausalLM, ids: Tensor = IDS) -> Tensor:
    return model.adaptation_logits(model.final_states(ids, preserved=False))


@torch.no_grad()
def heads(model: Any, ids: Tensor = IDS) -> list[Tensor]:
    logits: list[Tensor] = model.routed_logits(model.final_states(ids, preserved=True))
    return logits


@torch.no_grad()
def answered(base: Any, ids: Tensor = IDS) -> Tensor:
    logits: Tensor = base(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@siblings
def test_with_either_or_both_loaded_base_logits_are_the_bases_and_every_head_is_the_run_alones_bit_for_bit(
    one: tuple[Any, Any], other: tuple[Any, Any], dtype: torch.dtype
) -> None:
    base = nn.Module.to(tiny_llama(), dtype)
    expected = answered(base)
    first, second = sibling(base, one, seed=1), sibling(base, other, seed=2, ratio=1.0)
    alone = {"first": logits_alone(first), "second": logits_alone(second)}
    models = {"first": (0, first), "second": (0, second)}
    for loaded in (["first"], ["second"], ["first", "second"], ["second", "first"]):
        model = joined(base, **{name: models[name] for name in loaded})
        base_logits, *others = heads(model)
        assert torch.equal(base_logits, expected)
        for name, logits in zip(loaded, others, strict=True):
            assert torch.equal(logits, alone[name])
    assert (alone["first"] - alone["second"]).abs().max() > 0.1


@pytest.mark.parametrize("family", BASES)
def test_every_family_serves_two_siblings_and_a_child_from_one_forward(family: str) -> None:
    base = tiny(family)
    expected = answered(base)
    first, second = sibling(base, ("preserve", None), 1), sibling(base, ("adapt", "top:1"), 2)
    child = as_if_trained(widen(copy.deepcopy(second), "preserve", ratio=0.5), seed=3)
    model = joined(base, first=(0, first), second=(0, second), child=(2, child))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for layer in base.model.layers[:-1]:  # the last one runs once more, for the sibling that writes there
        layer.self_attn.o_proj.register_forward_hook(count)
    got = heads(model)
    assert calls == len(base.model.layers) - 1
    for logits, alone in zip(got, (expected, *map(logits_alone, (first, second, child))), strict=True):
        assert torch.equal(logits, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@parents
def test_a_stack_preserves_its_parents_logits_and_starts_as_it_bit_for_bit_whatever_it_learns(
    parent: tuple[Any, Any], dtype: torch.dtype
) -> None:
    base = nn.Module.to(tiny_llama(), dtype)
    below = sibling(base, parent, seed=1)
    base_logits, expected = answered(base), logits_alone(below)
    record = record_base(below, ModelConfig(base="below"))
    stacked = widen(below, "route", ratio=0.5)
    assert torch.equal(heads(stacked)[0], expected)
    assert torch.equal(heads(stacked)[1], expected), "step 0: H' = 0"
    losses = train_steps(stacked, IDS.flatten(), num_steps=20, lr=1e-2)
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    assert torch.equal(heads(stacked)[0], expected)
    assert torch.equal(logits_alone(below), expected)
    assert torch.equal(heads(below)[0], base_logits)
    assert (heads(stacked)[1] - expected).abs().mean() > 0.1, "training has moved the other head"
    assert changed_tensors(below, record) == []


@parents
def test_in_a_stack_only_the_top_expansion_trains_and_autograd_records_nothing_below(parent: tuple[Any, Any]) -> None:
    below = sibling(tiny_llama(), parent, seed=1)
    stacked = as_if_trained(widen(below, "preserve", ratio=0.5)).train()
    trained = {name for name, parameter in stacked.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in stacked.named_parameters() if name.startswith("expansion.")}
    seen: list[bool] = []
    for module in below.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(lambda _m, _i, output: seen.append(output.requires_grad))
    stacked(input_ids=IDS, labels=IDS).loss.backward()
    assert seen and not any(seen)
    assert [name for name, p in stacked.expansion.named_parameters() if p.grad is None] == [], "every block learns"


def test_a_broken_expansion_reaches_no_head_but_its_own_and_its_childrens() -> None:
    base = tiny_llama()
    good, bad = sibling(base, ("preserve", None), 1), sibling(base, ("adapt", None), 2)
    child = as_if_trained(widen(copy.deepcopy(bad), "preserve", ratio=0.5), seed=3)
    model = joined(base, good=(0, good), bad=(0, bad), child=(2, child))
    with torch.no_grad():
        for parameter in model.members[1].parameters():
            parameter.fill_(math.nan)
    base_logits, good_logits, *broken = heads(model)
    assert torch.equal(base_logits, answered(base)) and torch.equal(good_logits, logits_alone(good))
    assert all(logits.isnan().all() for logits in broken)
    assert model(input_ids=IDS, use_cache=False).logits.isfinite().all()


@settings(deadline=None, max_examples=25)
@given(
    stds=st.lists(st.floats(0.0, 0.6), min_size=1, max_size=3),
    broken=st.sets(st.integers(0, 2)),
    seed=st.integers(0, 2**16),
    stacked=st.booleans(),
)
@torch.no_grad()
def test_routing_costs_at_most_ln_of_the_number_of_heads_over_the_best_head_on_every_document(
    stds: list[float], broken: set[int], seed: int, stacked: bool
) -> None:
    base = tiny_llama(seed=0)
    members: dict[str, tuple[int, ScaleForCausalLM]] = {}
    for place, std in enumerate(stds):
        below = copy.deepcopy(members[f"m{place - 1}"][1]) if stacked and place else copy.deepcopy(base)
        model = as_if_trained(widen(below, "preserve", ratio=0.5), std=std, seed=seed + place)
        members[f"m{place}"] = (place if stacked else 0, model)
    router = joined(base, **members)
    for parameter in (p for place in broken & set(range(len(stds))) for p in router.members[place].parameters()):
        parameter.fill_(math.nan)
    ids = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(seed))
    routed = router(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    loss_B = -routed.gather(-1, ids[:, 1:, None]).squeeze(-1).double().sum(-1)
    said_KBT = token_log_probs(router, ids[:, :-1], ids[:, 1:]).log_probs_KBT.double()
    best_B = (-said_KBT.sum(-1)).amin(0)
    assert (loss_B <= best_B * (1 + 1e-6) + math.log(len(stds) + 1) + 1e-4).all()
    prior_K = router.log_prior()
    weights_KBS = posterior_log_weights(said_KBT, prior_K)
    # A softmax hands the share of a head that has broken to the others.
    sound_KBT = torch.where(said_KBT.isfinite(), weights_KBS[..., :-1], -torch.inf)
    exact_B = -mix_log_probs(sound_KBT - torch.logsumexp(sound_KBT, 0), said_KBT).sum(-1)
    torch.testing.assert_close(loss_B, exact_B, rtol=1e-5, atol=1e-4)
