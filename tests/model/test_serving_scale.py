"""What others ask of a widened model is done, or refused in one line where they ask it: never answered wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.widening import as_if_trained, joined, tiny_llama, widen

LORA = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["route", "adapt", "joined"])
def model(request: pytest.FixtureRequest) -> Any:
    base = tiny_llama()
    if request.param == "joined":
        return joined(base, one=(0, as_if_trained(widen(base, "preserve"))))
    return as_if_trained(widen(base, request.param, "top:1"))


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hidden states": (lambda model: model(IDS, output_hidden_states=True), "output_hidden_states"),
    "attentions": (lambda model: model(IDS, output_attentions=True), "output_attentions"),
    "embeddings": (lambda model: model.generate(inputs_embeds=model.get_input_embeddings()(IDS)), "pass input_ids"),
    "more tokens": (lambda model: model.resize_token_embeddings(70), "vocabulary"),
    "continuous batching": (lambda model: model.generate_batch(IDS.tolist()), r"generate\(\) on a padded batch"),
    "PEFT": (lambda model: get_peft_model(model, LORA), "no PEFT adapters"),
    "an adapter": (lambda model: model.add_adapter(LORA), "no PEFT adapters"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_widened_model_cannot_do_is_refused_in_one_line_at_the_call(model: Any, name: str) -> None:
    call, told = CALLS[name]
    with pytest.raises((ValueError, NotImplementedError), match=told) as refused:
        call(model)
    assert "\n" not in str(refused.value)
