"""The two streams of a pass: the base's head keeps its bits, and the base runs once."""

from typing import Any

import pytest
import torch

from tests.model.test_families import BASES, IDS, answered, tiny
from tests.widening import routed_heads, trained_head, trained_on


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(BASES)],
)
def test_both_heads_are_what_they_are_alone_bit_for_bit_from_one_forward(
    family: str, dtype: str
) -> None:
    base = tiny(family, dtype)
    expected = answered(base)
    for variant, layers in (("preserve", None), ("adapt", "top:1")):
        model = trained_on(base, variant, layers, seed=1)
        alone = trained_head(model, IDS)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        # The last layer runs once more where the expansion writes into it.
        for layer in model.base.model.layers[:-1]:
            layer.self_attn.o_proj.register_forward_hook(count)
        of_base, of_trained = routed_heads(model, IDS)
        assert calls == len(base.model.layers) - 1
        assert torch.equal(of_base.float(), expected)
        assert torch.equal(of_trained, alone)
