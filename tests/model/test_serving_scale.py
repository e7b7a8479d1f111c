"""What others ask of a widened model is done, or refused in one line where they ask it: never answered wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.widening import as_if_trained, joined, tiny_llama, widen

IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["route", "adapt", "joined"])
def model(request: pytest.FixtureRequest) -> Any:
    base = tiny_llama()
    if request.param == "joined":
        return joined(base, one=(0, as_if_trained(widen(base, "preserve"))))
    return as_if_trained(widen(base, request.param, "top:1"))


LORA = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hidden states": (lambda model: model(IDS, output_hidden_states=True), "output_hidden_states"),
    "attentions": (lambda model: model(IDS, output_attentions=True), "output_attentions"),
    "hidden states while generating": (
        lambda model: model.generate(IDS, output_hidden_states=True, return_dict_in_generate=True),
        "output_hidden_states",
    ),
    "embeddings": (lambda model: model.generate(inputs_embeds=model.get_input_embeddings()(IDS)), "pass input_ids"),
    "more tokens": (lambda model: model.resize_token_embeddings(70), "vocabulary of 61"),
    "padded tokens": (lambda model: model.resize_token_embeddings(61, 64), "vocabulary of 61"),
    "continuous batching": (lambda model: model.generate_batch(IDS.tolist()), r"generate\(\) on a padded batch"),
    "a manager of it": (lambda model: model.init_continuous_batching(), r"generate\(\) on a padded batch"),
    "PEFT": (lambda model: get_peft_model(model, LORA), "no PEFT adapters"),
    "an adapter": (lambda model: model.add_adapter(LORA), "no PEFT adapters"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_widened_model_cannot_do_is_refused_in_one_line_at_the_call(model: Any, name: str) -> None:
    call, told = CALLS[name]
    with pytest.raises((ValueError, NotImplementedError), match=told) as refused:
        call(model)
    assert "\n" not in str(refused.value)


def test_hidden_states_asked_for_by_the_configuration_are_refused_too(model: Any) -> None:
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(IDS)


def test_a_vocabulary_of_the_size_it_has_is_its_own_embedding(model: Any) -> None:
    for size in (None, 61):
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()


def test_gradient_checkpointing_is_turned_on_and_off_as_transformers_does_and_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model: Any = as_if_trained(widen(tiny_llama(), "route", "top:1")).train()
        assert model.supports_gradient_checkpointing and not model.is_gradient_checkpointing
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.is_checkpointing is model.is_gradient_checkpointing is checkpointing
        model(IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        assert all(p.grad is None for p in model.base.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    model.gradient_checkpointing_disable()
    assert not model.is_checkpointing
    model.activation_checkpointing_enable()
    assert model.is_checkpointing
    with pytest.raises(ValueError, match="every_n_layers=2"):
        model.activation_checkpointing_enable(every_n_layers=2)


def test_gradient_checkpointing_of_a_joined_model_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support"):
        joined(tiny_llama(), one=(0, widen(tiny_llama(), "preserve"))).gradient_checkpointing_enable()
