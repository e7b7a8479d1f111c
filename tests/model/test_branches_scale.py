"""Several expansions on one base, and expansion upon expansion: what is below never changes, and one forward serves."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from scale_cli.config.schema import ModelConfig
from scale_cli.upscale.base_record import changed_tensors, record_base
from tests.model.test_families import BASES, IDS, answered, tiny
from tests.widening import (
    joined,
    routed_heads,
    tiny_llama,
    train_steps,
    trained_head,
    trained_upon,
    widen,
)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(BASES)],
)
def test_of_siblings_and_a_child_every_head_is_what_it_is_alone_bit_for_bit_from_one_forward(
    family: str, dtype: str
) -> None:
    base = tiny(family, dtype)
    expected = answered(base)
    reads, writes = (
        trained_upon(base, "preserve", seed=1),
        trained_upon(base, "adapt", "top:1", seed=2),
    )
    child = trained_upon(writes, "preserve", ratio=1.0, seed=3)
    alone = {
        "reads": trained_head(reads, IDS),
        "writes": trained_head(writes, IDS),
        "child": trained_head(child, IDS),
    }
    runs = {"reads": (0, reads), "writes": (0, writes), "child": (2, child)}
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for layer in base.model.layers[
        :-1
    ]:  # the last one runs once more, for the sibling that writes there
        layer.self_attn.o_proj.register_forward_hook(count)
    for loaded in (["writes"], ["writes", "reads"], ["reads", "writes", "child"]):
        model, calls = joined(base, **{name: runs[name] for name in loaded}), 0
        base_logits, *others = routed_heads(model, IDS)
        assert calls == len(base.model.layers) - 1
        assert torch.equal(base_logits.float(), expected)
        for name, logits in zip(loaded, others, strict=True):
            assert torch.equal(logits, alone[name])


@pytest.mark.parametrize(
    ("parent", "dtype"),
    [
        (("preserve", None), torch.bfloat16),
        (("route", "top:1"), torch.float32),
        (("adapt", None), torch.bfloat16),
    ],
)
def test_a_stack_starts_as_its_parent_and_trains_alone_and_the_parent_keeps_its_bits(
    parent: tuple[Any, Any], dtype: torch.dtype
) -> None:
    base = nn.Module.to(tiny_llama(), dtype)
    below = trained_upon(base, *parent, seed=1)
    base_logits, expected = answered(base), trained_head(below, IDS)
    record = record_base(below, ModelConfig(base="below"))
    stacked = widen(below, "route", ratio=0.5)
    assert all(torch.equal(head, expected) for head in routed_heads(stacked, IDS)), "step 0: H' = 0"
    trained = {name for name, parameter in stacked.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in stacked.named_parameters() if name.startswith("expansion.")
    }
    seen: list[bool] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, output: seen.append(output.requires_grad))
        for module in below.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    losses = train_steps(stacked, IDS.flatten(), num_steps=5, lr=1e-2)
    for hook in hooks:
        hook.remove()
    assert seen and not any(seen), "autograd records nothing below"
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    assert torch.equal(routed_heads(stacked, IDS)[0], expected) and torch.equal(
        trained_head(below, IDS), expected
    )
    assert torch.equal(routed_heads(below, IDS)[0].float(), base_logits)
    assert (routed_heads(stacked, IDS)[1] - expected).abs().mean() > 0.1, (
        "training has moved the other head"
    )
    assert changed_tensors(below, record) == []


def test_a_broken_expansion_reaches_no_head_but_its_own_and_its_childrens() -> None:
    base = tiny_llama()
    good, bad = trained_upon(base, "preserve", seed=1), trained_upon(base, "adapt", seed=2)
    child = trained_upon(bad, "preserve", seed=3)
    model = joined(base, good=(0, good), bad=(0, bad), child=(2, child))
    with torch.no_grad():
        for parameter in model.members[1].parameters():
            parameter.fill_(math.nan)
    base_logits, good_logits, *broken = routed_heads(model, IDS)
    assert torch.equal(base_logits, answered(base)) and torch.equal(
        good_logits, trained_head(good, IDS)
    )
    assert all(logits.isnan().all() for logits in broken)
    assert model(input_ids=IDS, use_cache=False).logits.isfinite().all()
