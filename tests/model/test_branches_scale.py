"""Several expansions on one base: every head is what it is alone, and one forward pass of the base
serves all.
"""

import math
from typing import Any

import pytest
import torch

from tests.model.test_families import BASES, IDS, answered, tiny
from tests.widening import joined, routed_heads, tiny_llama, trained_head, trained_on


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(BASES)],
)
def test_every_head_is_what_it_is_alone_bit_for_bit_from_one_forward(
    family: str, dtype: str
) -> None:
    base = tiny(family, dtype)
    expected = answered(base)
    runs = {
        "reads": trained_on(base, "preserve", seed=1),
        "writes": trained_on(base, "adapt", "top:1", seed=2),
        "other": trained_on(base, "preserve", ratio=1.0, seed=3),
    }
    alone = {name: trained_head(run, IDS) for name, run in runs.items()}
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    # The last layer runs once more, for the one that writes there.
    for layer in base.model.layers[:-1]:
        layer.self_attn.o_proj.register_forward_hook(count)
    for loaded in (["writes"], ["writes", "reads"], ["reads", "writes", "other"]):
        model = joined(base, **{name: runs[name] for name in loaded})
        calls = 0
        base_logits, *others = routed_heads(model, IDS)
        assert calls == len(base.model.layers) - 1
        assert torch.equal(base_logits.float(), expected)
        for name, logits in zip(loaded, others, strict=True):
            assert torch.equal(logits, alone[name])


def test_a_broken_expansion_reaches_no_head_but_its_own() -> None:
    base = tiny_llama()
    good = trained_on(base, "preserve", seed=1)
    bad = trained_on(base, "adapt", seed=2)
    model = joined(base, good=good, bad=bad)
    with torch.no_grad():
        for parameter in model.members[1].parameters():
            parameter.fill_(math.nan)
    base_logits, good_logits, broken = routed_heads(model, IDS)
    assert torch.equal(base_logits, answered(base))
    assert torch.equal(good_logits, trained_head(good, IDS))
    assert broken.isnan().all()
    assert model(input_ids=IDS, use_cache=False).logits.isfinite().all()
