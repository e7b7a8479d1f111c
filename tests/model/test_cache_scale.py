"""What generation remembers: however prompts are padded, reordered and repeated, what follows is
the same.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from scale_cli.evaluation.around_generate import padded_left
from scale_cli.model import cache_scale
from scale_cli.model.cache_scale import CACHE
from scale_cli.model.pass_scale import ScaleCache
from tests.model.test_families import tiny
from tests.model.test_modeling_scale import some_ids
from tests.model.test_routed_scale import routed
from tests.widening import as_if_trained, tiny_llama, widen

# Each rule, and where none, some and all layers collaborate.
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adapt-top:1": ("adapt", "top:1", {}),
    "route-top:2-posterior": ("route", "top:2", {"rule": "posterior"}),
    "route-all-cosine": ("route", "all", {"rule": "cosine", "threshold": 0.8}),
}


@pytest.fixture(scope="module", params=[*SERVED, "one row"])
def model(request: pytest.FixtureRequest) -> Any:
    base = tiny_llama()
    if request.param == "one row":  # the plain export with its router
        return routed(as_if_trained(widen(base, "route")))
    variant, layers, rule = SERVED[request.param]
    return as_if_trained(widen(base, variant, layers, **rule))


def generate(model: Any, input_ids: Tensor, **options: Any) -> Any:
    settings = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids, **{**settings, **options})


def test_a_left_padded_batch_generates_what_its_prompts_do_one_by_one(model: Any) -> None:
    prompts = [some_ids(length, seed=length) for length in (13, 1, 6)]
    padded, mask = padded_left(prompts, padding=0)
    for use_cache in (True, False):
        together = generate(model, padded, attention_mask=mask, use_cache=use_cache)
        for prompt, row in zip(prompts, together, strict=True):
            alone = generate(model, prompt[None], use_cache=use_cache)[0]
            assert torch.equal(row[13 - len(prompt) :], alone)


@pytest.mark.parametrize(
    "family", ["gemma3_text", "qwen2, upper layers windowed", "olmo3, yarn in full layers"]
)
def test_a_layer_that_collaborates_is_decoded_with_its_cache_in_other_families(family: str) -> None:
    model = as_if_trained(widen(tiny(family), "route", "top:1"))
    cached, again = (generate(model, some_ids(1, 13), use_cache=one) for one in (True, False))
    assert torch.equal(cached, again)


@pytest.mark.parametrize(
    ("operation", "argument", "order"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0, 1]), [2, 0, 0, 1]),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
)
@torch.no_grad()
def test_a_cache_goes_on_as_the_sequences_that_it_is_of(
    model: Any, operation: str, argument: Any, order: list[int]
) -> None:
    prompts = some_ids(3, 9)
    following = some_ids(len(order), 5, seed=1)
    cache = model(input_ids=prompts)[CACHE]
    getattr(cache, operation)(argument)
    copied = copy.deepcopy(cache)
    continued, again = (model(input_ids=following, cache=one).logits for one in (cache, copied))
    whole = model(input_ids=torch.cat([prompts[order], following], dim=1), use_cache=False).logits
    torch.testing.assert_close(continued, whole[:, 9:], rtol=1e-4, atol=1e-5)
    assert torch.equal(continued, again)


def test_taking_tokens_back_is_refused() -> None:
    model = as_if_trained(widen(tiny_llama(), "route"))
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        generate(model, some_ids(1, 4).repeat(1, 6), prompt_lookup_num_tokens=3)


def test_an_empty_foreign_cache_is_replaced_and_a_filled_one_refused() -> None:
    model = as_if_trained(widen(tiny_llama(), "route"))
    cache = DynamicCache()
    assert isinstance(model(input_ids=some_ids(1, 4), cache=cache)[CACHE], ScaleCache)
    model.base(input_ids=some_ids(1, 4), **{CACHE: cache})
    with pytest.raises(ValueError, match="ScaleCache"):
        model(input_ids=some_ids(1, 1), cache=cache)


def test_a_decoding_step_without_its_state_is_an_error(model: Any) -> None:
    prompt = some_ids(2, 5)
    following = some_ids(2, 1, seed=1)
    whole = torch.ones(2, 6, dtype=torch.long)
    model(input_ids=prompt, use_cache=True)
    for cache in (None, ScaleCache()):
        with pytest.raises(ValueError, match=CACHE):
            model(input_ids=following, attention_mask=whole, cache=cache)
    with pytest.raises(ValueError, match=CACHE):
        _decode_by_an_unknown_name(model, prompt)


def _decode_by_an_unknown_name(model: Any, prompt: Tensor) -> None:
    """Generate as a transformers would that calls the cache by a name which the model does not
    know.
    """
    forward = model.forward

    @functools.wraps(forward)
    def without_cache(*args: Any, **kwargs: Any) -> Any:
        for name in ("cache", "past_key_values"):
            if name in kwargs:
                kwargs["renamed"] = kwargs.pop(name)
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", without_cache)
        generate(model, prompt)


@pytest.mark.parametrize("version", ["4.56.2", "5.25.0", "6.0.0"])
def test_an_untested_transformers_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scale_cli.model.cache_scale.transformers.__version__", version)
    with pytest.raises(ImportError, match=f"^transformers {version}: [^\n]+$"):
        cache_scale._name_of_cache()


@pytest.mark.parametrize("router_prior", [0.02, torch.tensor([0.98, 0.02])])
def test_a_step_judges_by_the_tokens_and_begins_from_the_prior_that_it_is_told(
    model: Any, router_prior: Any
) -> None:
    config = model.config
    if config.model_type == "scale" and (config.router_rule != "posterior" or not config.routes):
        model = as_if_trained(widen(tiny_llama(), "route"))
    prompts = some_ids(2, 9)
    judged = torch.ones(2, 9, dtype=torch.bool)
    judged[:, :4] = False
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    told = {"judged_mask": judged, "router_prior": router_prior}
    for use_cache in (True, False):
        generated = generate(model, prompts, use_cache=use_cache, **options, **told)
        whole = generated.sequences
        evidence = torch.cat([judged, torch.ones(2, whole.shape[1] - 9, dtype=torch.bool)], dim=1)
        asked = {"evidence_mask": evidence, "use_cache": False}
        with torch.no_grad():
            scored = model(whole, router_prior=router_prior, **asked).logits[:, 8:-1]
            by_default = model(whole, **asked).logits[:, 8:-1]
        logits = torch.stack(generated.logits, 1)
        torch.testing.assert_close(logits, scored, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits, by_default, rtol=1e-4, atol=1e-4)
    by_beams = {"num_beams": 2, "max_new_tokens": 3}
    beams = generate(model, prompts, **by_beams, **told)
    for row, prior in enumerate(torch.as_tensor(router_prior).expand(2).tolist()):
        one = slice(row, row + 1)
        told = {"judged_mask": judged[one], "router_prior": prior}
        assert torch.equal(beams[one], generate(model, prompts[one], **by_beams, **told))
