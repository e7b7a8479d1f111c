"""What torch.compile makes of a model, in generated code, which takes it half a minute for a layer."""

import copy

import pytest
import torch
from torch import Tensor

from scale_cli.training.objective import compiled
from tests.model.test_families import tiny
from tests.widening import as_if_trained, random_ids, tiny_llama, widen


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "olmo3, yarn in full layers", "exaone4, tied"]
)
@torch.no_grad()
def test_the_compiled_widened_model_has_the_compiled_bases_logits_bit_for_bit(family: str) -> None:
    base = tiny_llama(num_hidden_layers=2) if family == "llama" else tiny(family)
    ids = random_ids(2, 16)
    alone = copy.deepcopy(base)
    model = as_if_trained(widen(base, "route", "top:1"))

    def base_states(input_ids: Tensor) -> Tensor:
        return alone.model(input_ids, use_cache=False).last_hidden_state

    preserved = compiled(model.final_states)(ids, with_base_head=True).p_BTD
    expected = compiled(base_states)(ids)
    assert torch.equal(preserved, expected)
    assert torch.equal(model.base.lm_head(preserved), alone.lm_head(expected))
