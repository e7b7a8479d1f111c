"""The plain export served routed: it says what the two streams do, however transformers calls it."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from scale_cli.export.dense import dense_model
from scale_cli.export.plain_folder import router_keys
from scale_cli.model import routed_scale, routing
from scale_cli.model.cache_scale import CACHE
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routed_scale import RoutedModel, RouterLayer
from scale_cli.upscale.building import NewPieces
from tests.command_line import refused
from tests.model.test_families import BASES, tiny
from tests.widening import as_if_trained, random_ids, tiny_llama, widen

IDS = random_ids(2, 20)
PADDED = torch.ones_like(IDS)
PADDED[0, :5] = 0
Pair = tuple[Any, Any]


def routed(model: ScaleForCausalLM) -> Any:
    """The dense export as its folder is loaded with its router."""
    plain = dense_model(model, "float32")
    plain.config.scale_router = router_keys(model)
    loaded = getattr(routed_scale, f"ScaleRouted{type(plain).__name__}")(plain.config)
    loaded.load_state_dict(plain.state_dict())
    loaded.generation_config.pad_token_id = 0
    return loaded.eval()


def with_new_tokens() -> ScaleForCausalLM:
    """Old and new tokens are 61 in all."""
    new = NewPieces(["7 8", "3 7", "10 11", "3 10"], own_pieces=[7, 10])
    return as_if_trained(widen(tiny_llama(vocab_size=57), "route", new=new))


@functools.cache
def alone() -> Pair:
    model = as_if_trained(widen(tiny_llama(), "route"))
    return model, routed(model)


@pytest.fixture(scope="module", params=["old tokens", "new tokens"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "old tokens":
        return alone()
    model = with_new_tokens()
    return model, routed(model)


@pytest.fixture(scope="module")
def two() -> Pair:
    return alone()


@torch.no_grad()
def answered(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **{"use_cache": False, **kwargs}).logits


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)


def test_it_answers_as_the_two_streams_do_with_padding_and_without_and_has_their_loss(
    pair: Pair,
) -> None:
    two_streams, one_row = pair
    labels = IDS.masked_fill(PADDED == 0, -100)
    ours, theirs = (model(IDS, attention_mask=PADDED, labels=labels).loss for model in pair)
    close(ours, theirs)
    theirs.backward()
    close(answered(one_row), answered(two_streams))
    ours, theirs = (answered(model, attention_mask=PADDED)[PADDED.bool()] for model in pair)
    close(ours, theirs)


@pytest.mark.parametrize("family", BASES)
def test_of_every_family_it_answers_and_generates_the_same(family: str) -> None:
    model = as_if_trained(widen(tiny(family), "route"))
    one_row = routed(model)
    close(answered(one_row), answered(model))
    options = {"max_new_tokens": 12, "pad_token_id": 0, "attention_mask": PADDED}
    for cache in ("dynamic", "static"):
        generated = one_row.generate(IDS, **options, cache_implementation=cache)
        assert torch.equal(generated, model.generate(IDS, **options))


def test_positions_are_read_a_few_at_a_time_and_kept_as_they_are_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_row = pair[1]
    whole = answered(one_row, attention_mask=PADDED)
    head_logits = RoutedModel._logits_of_rows
    read: list[int] = []

    def reading(self: RoutedModel, rows_BTD: Tensor) -> Tensor:
        read.append(rows_BTD.shape[1])
        return head_logits(self, rows_BTD)

    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", 3 * 2 * 61)
    monkeypatch.setattr(routing, "FEWEST_ROWS", 1)
    monkeypatch.setattr(RoutedModel, "_logits_of_rows", reading)
    for keep in (0, 1, 8, 99, torch.tensor([13, 2, 19])):
        kept = slice(-keep, None) if isinstance(keep, int) else keep
        close(answered(one_row, attention_mask=PADDED, logits_to_keep=keep), whole[:, kept])
    assert max(read) == 3


@pytest.mark.parametrize(
    "way", ["a static cache", "twice in one", "in chunks", "prompt lookup", "an assistant"]
)
def test_however_it_generates_the_tokens_are_the_same(pair: Pair, way: str) -> None:
    # a prompt in which something can be looked up
    one_row = pair[1]
    ids = IDS[1:].repeat(1, 2)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = one_row.generate(ids, **options)
    ways: dict[str, dict[str, Any]] = {
        "a static cache": {"cache_implementation": "static"},
        "twice in one": {CACHE: StaticCache(one_row.config, max_cache_len=80)},
        "in chunks": {"prefill_chunk_size": 7},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "an assistant": {"assistant_model": dense_model(pair[0], "float32")},
    }
    assert torch.equal(one_row.generate(ids, **options, **ways[way]), expected)
    if way == "twice in one":
        ways[way][CACHE].reset()
        assert torch.equal(one_row.generate(ids, **options, **ways[way]), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_it_goes_on_as_the_two_streams_do_from_any_prior(pair: Pair, cache: str) -> None:
    two_streams, one_row = pair
    options = {"max_new_tokens": 12, "pad_token_id": 0, "attention_mask": PADDED}
    for prior in (1e-9, 0.5, torch.tensor([0.98, 0.02])):
        options["router_prior"] = prior
        generated = one_row.generate(IDS, **options, cache_implementation=cache)
        assert torch.equal(generated, two_streams.generate(IDS, **options))
    with torch.no_grad():
        one_row(IDS[:, :1], router_prior=0.02)
    assert one_row.log_weights_KB[0].exp().tolist() == pytest.approx([0.02, 0.02])


def test_a_step_with_a_static_cache_is_one_graph(two: Pair) -> None:
    one_row = two[1]
    expected = one_row.generate(IDS, attention_mask=PADDED, max_new_tokens=8)
    inputs: Any = one_row.prepare_inputs_for_generation
    cache: Any = StaticCache(one_row.config, max_cache_len=40)
    mask = PADDED
    ids = IDS
    step = torch.compile(one_row.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        logits = one_row(**inputs(IDS, attention_mask=mask, **{CACHE: cache})).logits
        for _ in range(8):
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            asked = inputs(ids, next_sequence_length=1, attention_mask=mask, **{CACHE: cache})
            state = cache.layers[-1].last.logits_KBV.data_ptr()
            logits = step(**asked).logits
            # Graphs replay on fixed addresses.
            assert cache.layers[-1].last.logits_KBV.data_ptr() == state
    assert torch.equal(ids, expected)


@settings(max_examples=30)
@given(st.data())
@torch.no_grad()
def test_whatever_calls_and_takings_back_a_text_came_by_its_scores_are_the_same(
    two: Pair, data: st.DataObject
) -> None:
    one_row = two[1]
    whole = answered(one_row)
    cache = DynamicCache(config=one_row.config)
    position = 0
    while position < IDS.shape[1]:
        length = data.draw(st.integers(1, IDS.shape[1] - position))
        logits = one_row(IDS[:, position : position + length], cache=cache).logits
        close(logits, whole[:, position : position + length])
        position += length
        taken_back = data.draw(st.integers(0, length - 1 if position == IDS.shape[1] else length))
        if position < IDS.shape[1]:
            cache.crop(-taken_back)
            position -= taken_back
        elif taken_back:
            break
    assert isinstance(cache.layers[-1], RouterLayer)


@torch.no_grad()
def test_one_token_in_16_bits_asks_the_head_once_and_so_does_any_head_that_is_no_plain_matrix(
    two: Pair,
) -> None:
    asked: list[tuple[int, ...]] = []
    hooked = copy.deepcopy(two[1]).bfloat16()
    hooked.lm_head.register_forward_hook(
        lambda _module, rows, _logits: asked.append(tuple(rows[0].shape))
    )
    cache = hooked(IDS[:1], use_cache=True)[CACHE]
    hooked(IDS[:1, :1], cache=cache)
    assert asked == [(2, 1, 1, hooked.config.hidden_size)]
    hooked = copy.deepcopy(two[1])
    quantised = copy.deepcopy(two[1])
    # As accelerate puts one where it moves a module about.
    add_hook_to_module(hooked.lm_head, ModelHook())
    close(answered(hooked), answered(two[1]))
    in_8_bits = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(quantised.lm_head))
    quantised.lm_head = in_8_bits[0]
    assert type(quantised.lm_head) is not torch.nn.Linear
    wanted = answered(two[1]).log_softmax(-1)
    assert (answered(quantised).log_softmax(-1) - wanted).abs().mean() < 0.05


def test_one_token_in_16_bits_has_a_gradient(two: Pair) -> None:
    model = copy.deepcopy(two[1]).bfloat16().requires_grad_(True)
    model(input_ids=IDS[:1, :1], use_cache=False).logits.sum().backward()
    assert model.lm_head.weight.grad.any()


def _filled_by_another(model: Any) -> None:
    cache = super(RoutedModel, model).forward(IDS, use_cache=True)[CACHE]
    model(IDS, cache=cache)


@torch.no_grad()
def _cropped_too_far(model: Any) -> None:
    cache = model(IDS, use_cache=True)[CACHE]
    model(IDS[:, :2], cache=cache)
    cache.crop(-3)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "embeddings": (
        lambda m: m.generate(inputs_embeds=m.get_input_embeddings()(IDS)),
        "pass input_ids",
    ),
    "continuous batching": (lambda m: m.generate_batch(IDS.tolist()), "no continuous batching"),
    "a manager of it": (lambda m: m.init_continuous_batching(), "no continuous batching"),
    "another model's cache": (_filled_by_another, "another model filled this cache"),
    "a mask of four dimensions": (
        lambda m: m(IDS, attention_mask=torch.ones(2, 1, 20, 20)),
        "mask of two dimensions",
    ),
    "tokens to be left": (lambda _: RouterLayer([DynamicLayer()]).crop(3), "needs transformers 5"),
    "too many tokens taken back": (_cropped_too_far, "tokens of the last call"),
    "a plain model": (lambda m: type(m)(tiny_llama().config), "this is a plain model"),
    "another model's keys": (
        lambda m: type(m)(type(m.config)(**m.config.to_dict() | {"hidden_size": 60})),
        "does not fit hidden_size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_in_one_line(two: Pair, name: str) -> None:
    call, told = REFUSED[name]
    with refused((ValueError, NotImplementedError), told):
        call(two[1])
