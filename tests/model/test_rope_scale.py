"""Every RoPE type and head layout of a Llama: preserved bit for bit, and exactly a plain Llama when exported."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scale_cli.export.dense import dense_model
from tests.widening import as_if_trained, tiny_llama, widen

_ORIGINAL_LENGTH = 32  # prompts of the tests are shorter and longer

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": _ORIGINAL_LENGTH},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
EXTRAS: dict[str, dict[str, bool]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
}


def test_every_rope_type_that_transformers_knows_is_tried() -> None:
    assert set(ROPE) == {"default", *ROPE_INIT_FUNCTIONS}


# Every head layout with every extra, and every type: a type changes angles alone, whatever a weight's shape is.
@pytest.mark.parametrize(
    ("rope", "heads", "extra"),
    [(rope, heads, extra) for rope, (heads, extra) in zip(cycle(ROPE), product(HEADS, EXTRAS), strict=False)],
)
@torch.no_grad()
def test_preserved_bit_for_bit_and_exactly_a_plain_llama(rope: str, heads: str, extra: str) -> None:
    num_heads, num_key_value_heads = HEADS[heads]
    base = tiny_llama(
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        num_hidden_layers=2,
        max_position_embeddings=48,
        rope_parameters={"rope_type": rope, "rope_theta": 10_000.0, **ROPE[rope]},
        **EXTRAS[extra],
    )
    model = as_if_trained(widen(base, "route", "top:1", ratio=0.5))
    dense = dense_model(model, "float32")
    # Below and above the original length, and back: some types change their frequencies with the length.
    for length in (20, 60, 20):
        input_ids = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(length))
        states = model.final_states(input_ids, preserved=True)
        assert torch.equal(model.base_logits(states), base(input_ids, use_cache=False).logits)
        difference = dense(input_ids, use_cache=False).logits - model.adaptation_logits(states)
        assert difference.abs().max() <= 1e-4
