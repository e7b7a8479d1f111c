"""What a widened model answers, to whoever calls it: done as transformers does it, or refused in
one line.

The promise of every base's bits is in `test_families.py`; that evaluation computes the same routes,
in `tests/evaluation/test_benchmark_heads.py`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from scale_cli.model.modeling_scale import ScaleForCausalLM
from tests.command_line import refused
from tests.widening import as_if_trained, routed_heads, tiny_llama, trained_head, widen


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))  # 0 pads


IDS = some_ids(2, 9)


@pytest.mark.parametrize(
    ("layers", "broken"), [("none", math.nan), ("top:2", math.inf), ("all", math.nan)]
)
@torch.no_grad()
def test_a_broken_expansion_reaches_neither_the_base_logits_nor_the_routed_ones(
    layers: str, broken: float
) -> None:
    base = tiny_llama()
    input_ids = some_ids(3, 17)
    expected = base(input_ids, use_cache=False).logits
    model = widen(base, "route", layers)
    for parameter in model.expansion.parameters():
        parameter.fill_(broken)
    assert torch.isnan(trained_head(model, input_ids)).all()
    assert torch.equal(routed_heads(model, input_ids)[0], expected)
    for rule in ("posterior", "cosine"):
        model.config.router_rule = rule
        routed = model(input_ids=input_ids, use_cache=False).logits
        atol = 1e-5 if rule == "posterior" else 0.0
        torch.testing.assert_close(routed, expected, rtol=1e-6, atol=atol)


@torch.no_grad()
def test_scores_of_an_untrained_route_are_the_bases_logits_so_that_a_repetition_penalty_acts_on_them() -> (
    None
):
    base = tiny_llama()
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    penalised = base.generate(IDS, repetition_penalty=1.3, **settings)
    assert not torch.equal(base.generate(IDS, **settings), penalised)
    model = widen(base, "route")
    torch.testing.assert_close(model(IDS).logits, base(IDS).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(IDS, repetition_penalty=1.3, **settings), penalised)


@pytest.mark.parametrize(
    ("variant", "layers"),
    [("preserve", None), ("adapt", None), ("route", "none"), ("route", "top:2")],
)
@torch.no_grad()
def test_training_answers_with_the_trained_head_and_serving_by_the_router(
    variant: str, layers: str | None
) -> None:
    model = as_if_trained(widen(tiny_llama(), variant, layers))
    input_ids = IDS
    labels = input_ids.masked_fill(some_ids(2, 9, seed=2) < 20, -100)
    trained = trained_head(model, input_ids)
    for training in (True, False):
        logits = model.train(training)(input_ids=input_ids).logits
        assert torch.equal(logits, trained) is (training or variant != "route")
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(model(input_ids=input_ids, labels=labels).loss, expected)


@pytest.mark.parametrize(
    ("variant", "rule"), [("adapt", "posterior"), ("route", "posterior"), ("route", "cosine")]
)
@torch.no_grad()
def test_logits_to_keep_keeps_the_last_ones_or_those_of_an_index(variant: str, rule: str) -> None:
    model = as_if_trained(widen(tiny_llama(), variant, "top:2", rule=rule))
    whole = model(input_ids=IDS).logits
    index = torch.tensor([4, 0, -1])
    for kept, expected in ((1, whole[:, -1:]), (9, whole), (index, whole[:, index])):
        logits = model(input_ids=IDS, logits_to_keep=kept).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_loaded_model_lies_on_one_device_or_is_refused(tmp_path: Path) -> None:
    model = as_if_trained(widen(tiny_llama(), "route", "none"))
    model.save_pretrained(tmp_path)
    # The room there is would put its parts into different places.
    loaded = ScaleForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": 20_000}
    )
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    for parts in ({"": "cpu", "base.model.layers.0": "meta"}, {"": "disk"}):
        with pytest.raises(ValueError, match=r"device_map: .* on one device"):
            ScaleForCausalLM.from_pretrained(tmp_path, device_map=parts)


LORA = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(params=["route", "adapt"])
def model(request: pytest.FixtureRequest) -> Any:
    return as_if_trained(widen(tiny_llama(), request.param, "top:1"))


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hidden states": (lambda model: model(IDS, output_hidden_states=True), "output_hidden_states"),
    "attentions": (lambda model: model(IDS, output_attentions=True), "output_attentions"),
    "embeddings": (
        lambda model: model.generate(inputs_embeds=model.get_input_embeddings()(IDS)),
        "inputs_embeds",
    ),
    "more tokens": (lambda model: model.resize_token_embeddings(70), "vocabulary"),
    "continuous batching": (
        lambda model: model.generate_batch(IDS.tolist()),
        r"generate\(\) on a padded batch",
    ),
    "PEFT": (lambda model: get_peft_model(model, LORA), "no PEFT adapters"),
    "an adapter": (lambda model: model.add_adapter(LORA), "no PEFT adapters"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_widened_model_cannot_do_is_refused_in_one_line_at_the_call(
    model: Any, name: str
) -> None:
    call, told = CALLS[name]
    with refused((ValueError, NotImplementedError), told):
        call(model)
