from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from scale_cli.config.schema import ModelConfig
from scale_cli.model.heads import token_log_probs
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import cosine_serves_base, log_prior, mix_log_probs, posterior_log_weights
from scale_cli.upscale.base import changed_tensors, record_base
from tests.widening import CHECKPOINTS, as_if_trained, joined, real_base, real_ids, tiny_llama, train_steps, widen

pytestmark = pytest.mark.long

# Variant and collaborating layers; the paper's three, and route with and without an untouched stream of its own.
METHODS = [("preserve", None), ("adapt", None), ("route", "none"), ("route", "top:2")]


def prompts(ids: Tensor) -> list[Tensor]:
    """64 prompts of 16 to 48 tokens from all over a token stream, in batches of equal shape."""
    starts = torch.linspace(0, len(ids) - 48, 64).long().split(16)
    return [
        torch.stack([ids[start : start + length] for start in batch.tolist()])
        for batch, length in zip(starts, (16, 24, 32, 48), strict=True)
    ]


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def both_heads(model: ScaleForCausalLM, input_ids: Tensor) -> list[Tensor]:
    return model.routed_logits(model.final_states(input_ids, preserved=True))


@torch.no_grad()
def base_path(model: ScaleForCausalLM, input_ids: Tensor) -> Tensor:
    return model.base_logits(model.final_states(input_ids, preserved=True))


@torch.no_grad()
def adaptation(model: ScaleForCausalLM, input_ids: Tensor) -> Tensor:
    return model.adaptation_logits(model.final_states(input_ids, preserved=False))


# Every method, on either checkpoint and in either dtype; `test_families.py` has all of them together, on small models.
@pytest.mark.parametrize(
    ("variant", "layers", "checkpoint", "dtype"),
    [
        (*method, CHECKPOINTS[index % 2], ("float32", "bfloat16")[index // 2 % 2])
        for index, method in enumerate(METHODS)
    ],
)
@torch.no_grad()
def test_base_logits_are_the_base_models_bit_for_bit_before_and_after_training(
    shared_data: Path, checkpoint: str, dtype: Any, variant: str, layers: str | None
) -> None:
    folder, ids = shared_data / checkpoint / "hf", real_ids(shared_data, checkpoint)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    expected = [original(batch, use_cache=False).logits for batch in prompts(ids)]
    model = widen(real_base(shared_data, checkpoint, dtype), variant, layers)
    record = record_base(model.base, ModelConfig(base=str(folder), dtype=dtype))

    for batch, logits in zip(prompts(ids), expected, strict=True):
        preserved, adapted = both_heads(model, batch)
        assert torch.equal(preserved, logits)
        assert torch.equal(adapted, logits.float()), "step 0: H' = 0 and W12 = 0"
    with torch.enable_grad():
        losses = train_steps(model, ids, num_steps=5, lr=2e-2)
    for batch, logits in zip(prompts(ids), expected, strict=True):
        preserved, adapted = both_heads(model, batch)
        assert torch.equal(preserved, logits)
        assert (adapted - logits.float()).abs().mean() > 0.1, "training has moved the other head"
    assert all(math.isfinite(loss) for loss in losses)
    assert changed_tensors(model.base, record) == []


def base_outputs(model: ScaleForCausalLM, input_ids: Tensor) -> dict[str, Tensor]:
    """What every product and norm of the base returned in one training forward pass, by module name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: seen.__setitem__(name, output)

    # The activation function has no weights and serves both streams: it is nobody's.
    handles = [
        module.register_forward_hook(keep(name))
        for name, module in model.base.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    model.train()(input_ids=input_ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("variant", "layers", "recorded"), [("preserve", None, []), ("adapt", "top:1", ["model.norm", "lm_head"])]
)
def test_below_the_first_collaborating_layer_autograd_records_nothing_of_the_base_stream(
    variant: str, layers: str | None, recorded: list[str]
) -> None:
    seen = base_outputs(as_if_trained(widen(tiny_llama(), variant, layers)), some_ids(2, 9))
    assert {name.rsplit(".", 1)[-1] for name in seen} > {"embed_tokens", "q_proj", "down_proj", "norm", "lm_head"}
    below = [name for name in seen if layers is None or not name.startswith("model.layers.2.")]
    assert [name for name in below if seen[name].requires_grad] == recorded


@pytest.mark.parametrize(("layers", "broken"), [("none", math.nan), ("top:2", math.inf), ("all", math.nan)])
@torch.no_grad()
def test_a_broken_expansion_reaches_neither_the_base_logits_nor_the_routed_ones(layers: str, broken: float) -> None:
    base, input_ids = tiny_llama(), some_ids(3, 17)
    expected = base(input_ids, use_cache=False).logits
    model = widen(base, "route", layers)
    for parameter in model.expansion.parameters():
        parameter.fill_(broken)
    assert torch.isnan(adaptation(model, input_ids)).all()
    assert torch.equal(base_path(model, input_ids), expected)
    for rule in ("posterior", "cosine"):
        model.config.router_rule = rule
        routed = model(input_ids=input_ids, use_cache=False).logits
        torch.testing.assert_close(routed, expected, rtol=1e-6, atol=1e-5 if rule == "posterior" else 0.0)


@pytest.mark.parametrize(("layers", "switch_rate"), [("none", 0.01), ("top:2", 0.0), ("all", 0.01)])
@torch.no_grad()
def test_posterior_logits_are_what_evaluation_computes_from_observations(layers: str, switch_rate: float) -> None:
    model = as_if_trained(widen(tiny_llama(), "route", layers, switch_rate=switch_rate, prior=0.3))
    ids = some_ids(4, 40)
    input_ids, next_ids = ids[:, :-1], ids[:, 1:]
    observed = token_log_probs(model, input_ids, next_ids)
    prior_K = log_prior(0.3)
    weights = posterior_log_weights(observed.log_probs_KBT, prior_K, switch_rate)
    expected = mix_log_probs(weights[..., :-1], observed.log_probs_KBT.double())
    routed = model(input_ids=input_ids, use_cache=False).logits
    came = routed.log_softmax(-1).gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(came.double(), expected, rtol=1e-5, atol=1e-5)
    assert weights[0].exp().std() > 0.02, "neither head is the only one heard"


@torch.no_grad()
def test_scores_of_an_untrained_route_are_the_bases_logits_so_that_a_repetition_penalty_acts_on_them() -> None:
    base: Any = tiny_llama()
    prompt = some_ids(2, 9)
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain, penalised = (base.generate(prompt, repetition_penalty=penalty, **settings) for penalty in (1.0, 1.3))
    assert not torch.equal(plain, penalised)
    model: Any = widen(base, "route")
    torch.testing.assert_close(model(prompt).logits, base(prompt).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(prompt, repetition_penalty=1.3, **settings), penalised)


@torch.no_grad()
def test_cosine_logits_are_one_heads_or_the_others_as_evaluation_has_it() -> None:
    model = as_if_trained(widen(tiny_llama(), "route", "top:1", rule="cosine"))
    input_ids = some_ids(4, 40)
    states = model.final_states(input_ids, preserved=True)
    cosine = token_log_probs(model, input_ids, input_ids).cosine_BT
    model.config.router_threshold = cosine.quantile(0.3).item()
    serves_base = cosine_serves_base(cosine, model.config.router_threshold)
    assert 0.5 < serves_base.float().mean() < 0.9, "both heads serve"
    base, adapted = model.routed_logits(states)
    expected = torch.where(serves_base.unsqueeze(-1), base, adapted)
    assert torch.equal(model(input_ids=input_ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(("variant", "layers"), [*METHODS, ("route", "all")])
@torch.no_grad()
def test_training_answers_with_the_adaptation_head_serving_by_the_router_and_a_loss_is_of_those_logits(
    variant: str, layers: str | None
) -> None:
    model, input_ids = as_if_trained(widen(tiny_llama(), variant, layers)), some_ids(2, 9)
    labels = input_ids.masked_fill(some_ids(2, 9, seed=2) < 20, -100)
    adapted = adaptation(model, input_ids)
    for training in (True, False):
        logits = model.train(training)(input_ids=input_ids).logits
        assert torch.equal(logits, adapted) is (training or variant != "route")
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(model(input_ids=input_ids, labels=labels).loss, expected)


@pytest.mark.parametrize(("variant", "rule"), [("adapt", "posterior"), ("route", "posterior"), ("route", "cosine")])
@torch.no_grad()
def test_logits_to_keep_keeps_the_last_ones_or_those_of_an_index(variant: str, rule: str) -> None:
    model = as_if_trained(widen(tiny_llama(), variant, "top:2", rule=rule))
    whole, index = model(input_ids=some_ids(2, 9)).logits, torch.tensor([4, 0, -1])
    for kept, expected in ((1, whole[:, -1:]), (9, whole), (index, whole[:, index])):
        logits = model(input_ids=some_ids(2, 9), logits_to_keep=kept).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_class", [ScaleForCausalLM, JoinedForCausalLM])
@torch.no_grad()
def test_a_loaded_model_lies_on_one_device_or_is_refused(tmp_path: Path, model_class: Any) -> None:
    base = tiny_llama()
    model: Any = as_if_trained(widen(base, "route", "none"))
    if model_class is JoinedForCausalLM:
        model = joined(base, one=(0, model))
    model.save_pretrained(tmp_path)
    # The room there is would put its parts into different places.
    loaded = model_class.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": 20_000})
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded(input_ids=some_ids(1, 9)).logits, model(input_ids=some_ids(1, 9)).logits)
    for parts in ({"": "cpu", "base.model.layers.0": "meta"}, {"": "disk"}):
        with pytest.raises(ValueError, match="device_map: a widened model must lie on one device, not on"):
            model_class.from_pretrained(tmp_path, device_map=parts)
