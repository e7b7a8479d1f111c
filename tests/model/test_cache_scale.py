from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from scale_cli.model.cache_scale import ScaleCache
from scale_cli.model.modeling_scale import ScaleForCausalLM
from tests.widening import as_if_trained, joined, tiny_llama, widen

# Each set of layers that collaborate and each rule, once: a layer's cache knows nothing of the router.
SERVED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "preserve": ("preserve", None, {}),
    "adapt-top:1": ("adapt", "top:1", {}),
    "route-none-posterior": ("route", "none", {"rule": "posterior", "switch_rate": 0.0}),
    "route-top:2-switching": ("route", "top:2", {"rule": "posterior", "switch_rate": 0.01}),
    "route-all-cosine": ("route", "all", {"rule": "cosine", "threshold": 0.8}),
}


TREES = ("stack", "stack on all layers", "joined")


def upon(below: PreTrainedModel, variant: str, layers: str | None, seed: int) -> ScaleForCausalLM:
    return as_if_trained(widen(copy.deepcopy(below), variant, layers, ratio=0.5), seed=seed)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    base = tiny_llama()
    if request.param in SERVED:
        variant, layers, rule = SERVED[request.param]
        return as_if_trained(widen(base, variant, layers, **rule))
    if request.param == "stack on all layers":
        return upon(upon(base, "route", "all", 4), "route", None, 5)
    first, second = upon(base, "preserve", None, 1), upon(base, "adapt", "top:2", 2)
    child = upon(second, "route", None, 3)
    return child if request.param == "stack" else joined(base, first=(0, first), second=(0, second), child=(2, child))


served = pytest.mark.parametrize("model", SERVED, indirect=True)
any_tree = pytest.mark.parametrize("model", [*SERVED, *TREES], indirect=True)


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


def generate(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    generated: Tensor = model.generate(input_ids, **{**settings, **options})
    return generated


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    length = max(len(prompt) for prompt in prompts)
    padded, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return padded, mask


@any_tree
def test_a_left_padded_batch_generates_what_its_prompts_do_one_by_one(model: ScaleForCausalLM) -> None:
    prompts = [some_ids(length, seed=length) for length in (13, 1, 6)]
    input_ids, mask = left_padded(prompts)
    for use_cache in (True, False):
        together = generate(model, input_ids, attention_mask=mask, use_cache=use_cache)[:, 13:]
        alone = [generate(model, prompt[None], use_cache=use_cache)[0, len(prompt) :] for prompt in prompts]
        assert torch.equal(together, torch.stack(alone))


@any_tree
def test_beam_search_with_a_cache_is_beam_search_without_one(model: ScaleForCausalLM) -> None:
    cached, uncached = (
        generate(model, some_ids(2, 7), max_new_tokens=8, num_beams=3, num_return_sequences=2, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)


@served
@torch.no_grad()
def test_a_left_padded_prompt_read_in_pieces_gives_the_logits_of_the_unpadded_one(model: ScaleForCausalLM) -> None:
    prompts = [some_ids(length, seed=length) for length in (15, 9)]
    input_ids, mask = left_padded(prompts)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    first = model(input_ids=input_ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8])
    second = model(
        input_ids=input_ids[:, 8:],
        attention_mask=mask,
        position_ids=positions[:, 8:],
        past_key_values=first.past_key_values,
    )
    for row, prompt in enumerate(prompts):
        alone = model(input_ids=prompt[None], use_cache=False).logits[0, -7:]
        torch.testing.assert_close(second.logits[row], alone, rtol=1e-5, atol=1e-5)


@served
@torch.no_grad()
def test_logits_to_keep_leaves_the_same_state_behind(model: ScaleForCausalLM) -> None:
    prompt, following = some_ids(2, 9), some_ids(2, 3, seed=1)
    caches = [model(input_ids=prompt, logits_to_keep=kept).past_key_values for kept in (0, 1, torch.tensor([8, 3]))]
    all_kept, *fewer = (model(input_ids=following, past_key_values=cache).logits for cache in caches)
    for kept in fewer:
        torch.testing.assert_close(kept, all_kept, rtol=1e-5, atol=1e-5)


@served
@torch.no_grad()
def test_a_reordered_cache_continues_as_the_reordered_prompts_do(model: ScaleForCausalLM) -> None:
    prompts, following = some_ids(3, 9), some_ids(4, 5, seed=1)
    chosen = torch.tensor([2, 0, 0, 1])
    expected = model(input_ids=torch.cat([prompts[chosen], following], dim=1), use_cache=False).logits[:, 9:]
    for select in ("reorder_cache", "batch_select_indices"):
        cache = model(input_ids=prompts).past_key_values
        getattr(cache, select)(chosen)
        continued = model(input_ids=following, past_key_values=cache).logits
        torch.testing.assert_close(continued, expected, rtol=1e-5, atol=1e-5)


@served
@torch.no_grad()
def test_a_repeated_cache_continues_as_the_repeated_prompts_do(model: ScaleForCausalLM) -> None:
    prompts, following = some_ids(2, 9), some_ids(4, 5, seed=1)
    cache = model(input_ids=prompts).past_key_values
    cache.batch_repeat_interleave(2)
    continued = model(input_ids=following, past_key_values=cache).logits
    whole = torch.cat([prompts.repeat_interleave(2, dim=0), following], dim=1)
    torch.testing.assert_close(continued, model(input_ids=whole, use_cache=False).logits[:, 9:], rtol=1e-5, atol=1e-5)


def test_taking_tokens_back_is_refused() -> None:
    model = as_if_trained(widen(tiny_llama(), "route"))
    cache = model(input_ids=some_ids(1, 9)).past_key_values
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        generate(model, some_ids(1, 4).repeat(1, 6), prompt_lookup_num_tokens=3)


def test_an_empty_foreign_cache_is_replaced_and_a_filled_one_refused() -> None:
    model, cache = as_if_trained(widen(tiny_llama(), "route")), DynamicCache()
    assert isinstance(model(input_ids=some_ids(1, 4), past_key_values=cache).past_key_values, ScaleCache)
    model.base(input_ids=some_ids(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="ScaleCache"):
        model(input_ids=some_ids(1, 1), past_key_values=cache)
