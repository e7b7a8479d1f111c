import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._inductor.kernel.flex import flex_attention

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.export.dense import largest_stream_ratio
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.training.objective import (
    _FLEX_HEAD_DIM,
    ChunkedLossModel,
    compiled,
    for_training,
    settings_on,
)
from scale_cli.upscale.building import MethodModel, NewPieces, start_model
from scale_cli.upscale.stream_ratios import layer_ratios, measured_stream_ratios
from scripts.benchmark.counting import peak_bytes
from tests.command_line import refused
from tests.small_runs import SMALLEST, load_text
from tests.steps import Steps, batches_of
from tests.widening import as_if_trained, random_ids, tiny_llama, widen

pytestmark = pytest.mark.long

METHODS = {
    "preserve": {"variant": "preserve"},
    "route": {"variant": "route", "collaboration": {"layers": "top:1"}},
    "adapt": {"variant": "adapt"},
    "full": {"variant": "full"},
    "freeze": {"variant": "freeze", "freeze": {"num_layers": 1}},
    "lora": {"variant": "lora"},
    "lora, head": {"variant": "lora", "lora": {"targets": ["q_proj", "lm_head"]}},
    "lora, whole embeddings": {"variant": "lora", "lora": {"embeddings": True}},
}


def start(name: str, **sizes: Any) -> MethodModel:
    model = start_model(tiny_llama(**sizes), MethodConfig.model_validate(METHODS[name]), seed=0)
    return model.train()


def losses(
    model: MethodModel, num_steps: int = 2, wrapped: torch.nn.Module | None = None, **settings: Any
) -> list[float]:
    train = TrainConfig(max_steps=8, lr=1e-2, schedule="constant", **settings)
    steps = Steps(model, train, batches_of(2, 4), wrapped=wrapped)
    return [steps.take(step).result().loss for step in range(num_steps)]


@pytest.mark.parametrize("name", ["freeze", "lora, whole embeddings"])
def test_a_baseline_learns_as_it_does_with_transformers_own_loss(name: str) -> None:
    ours, theirs = start(name), start(name)
    assert losses(ours) == pytest.approx(losses(theirs, wrapped=theirs), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "tied", "in_chunks"),
    [
        ("lora, head", False, False),
        ("lora, whole embeddings", False, True),
        ("lora, whole embeddings", True, True),
    ],
)
def test_adapters_learn_and_only_those_in_the_head_need_logits_of_all_positions(
    name: str, tied: bool, in_chunks: bool
) -> None:
    model = start(name, tie_word_embeddings=tied)
    assert isinstance(for_training(model, TrainConfig(max_steps=1)), ChunkedLossModel) is in_chunks
    before = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
    losses(model)
    for parameter, was in zip(trainable_parameters(model).values(), before.values(), strict=True):
        assert not torch.equal(parameter, was)


@pytest.mark.parametrize(("name", "num_again"), [("route", 1), ("adapt", 3), ("full", 3)])
def test_checkpointing_computes_again_what_trains_and_no_frozen_layer(
    name: str, num_again: int
) -> None:
    calls: list[int] = []
    model = start(name)
    for layer in getattr(model, "base", model).model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    losses(model, num_steps=1, activation_checkpointing=True)
    # Two micro-batches through three layers, and once more those that collaborate or train.
    assert len(calls) == 2 * (3 + num_again)


def step_peak(name: str, *, activation_checkpointing: bool) -> int:
    """Return the most bytes that forward and backward of one micro-batch hold at once."""
    base = tiny_llama(hidden_size=64, intermediate_size=256, num_hidden_layers=6)
    model = start_model(base, MethodConfig.model_validate(METHODS[name]), seed=0).train()
    settings = TrainConfig(max_steps=1, activation_checkpointing=activation_checkpointing)
    wrapped = for_training(model, settings)
    ids = random_ids(8, 64)

    def forward_and_backward() -> None:
        wrapped(
            input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=512, use_cache=False
        ).loss.backward()
        model.zero_grad(set_to_none=True)

    return peak_bytes(forward_and_backward)


@pytest.mark.parametrize("name", ["adapt", "full"])
def test_activation_checkpointing_holds_less_than_half_at_once(name: str) -> None:
    whole = step_peak(name, activation_checkpointing=False)
    assert step_peak(name, activation_checkpointing=True) < 0.5 * whole


def trace_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled be traced whole and run as traced: generating its code takes most of the time."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, **how: compile_(f, **{**how, "backend": "aot_eager", "options": None}),
    )


def grown() -> MethodModel:
    new = NewPieces(["7 8 9", "7 8", "3 7"], own_pieces=[7])
    return start_model(
        tiny_llama(vocab_size=58, num_hidden_layers=1), MethodConfig(), 0, new
    ).train()


# A run of `route` is compiled, into generated code too, in tests/integration/test_sharding.py.
@pytest.mark.parametrize("name", ["lora", "grown"])
def test_compiled_training_is_traced_whole_and_has_the_losses_of_plain_training(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def make() -> MethodModel:
        return grown() if name == "grown" else start(name, num_hidden_layers=1)

    expected = losses(make())
    trace_alone(monkeypatch)
    assert losses(make(), compile=True) == pytest.approx(expected, rel=1e-4)


def test_layers_of_one_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives up after eight compilations of one function, so a model may have more layers."""
    trace_alone(monkeypatch)
    deep = start("preserve", num_hidden_layers=10)
    assert losses(deep, compile=True)


def test_what_cannot_be_compiled_whole_is_refused_in_one_line() -> None:
    with refused(TrainingError, r"^train\.compile: cannot compile a layer here: .+"):
        compiled(lambda x: x if x.sum() > 0 else -x)(torch.ones(3))


def test_an_attention_that_cannot_train_on_the_device_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.attention: flex_attention.*no backward pass on a CPU"
    ):
        settings_on("cpu", load_text(SMALLEST, "train.attention=flex_attention"))


@pytest.mark.parametrize(
    ("head_dim", "is_refused"), [(8, True), (14, True), (16, False), (24, False)]
)
def test_heads_are_refused_exactly_where_torchs_flex_kernel_refuses_them(
    head_dim: int, is_refused: bool
) -> None:
    # Compiling the kernel needs a GPU, so its condition is read.
    assert f"Lt(query.get_size()[-1], {_FLEX_HEAD_DIM})" in inspect.getsource(flex_attention)
    model = widen(tiny_llama(head_dim=head_dim), "preserve")
    train = TrainConfig.model_validate({"max_steps": 1, "attention": "flex_attention"})
    told = rf"^train\.attention: flex_attention.*have {head_dim}; set [^\n]+$"
    with pytest.raises(ConfigError, match=told) if is_refused else nullcontext():
        for_training(model, train)


@pytest.mark.parametrize(
    ("device", "overrides", "expected"),
    [
        ("cuda", (), None),
        ("cuda", ("corpus.isolate_documents=true",), "flex_attention"),
        ("cuda", ("corpus.isolate_documents=true", "train.attention=sdpa"), "sdpa"),
        ("cpu", ("corpus.isolate_documents=true",), None),
    ],
)
def test_isolated_documents_attend_without_a_mask_where_kernels_skip_what_is_masked(
    device: str, overrides: tuple[str, ...], expected: str | None
) -> None:
    assert settings_on(device, load_text(SMALLEST, *overrides)).attention == expected


@torch.no_grad()
def test_the_ratio_before_the_first_norm_is_that_of_the_embeddings_and_every_norm_is_measured() -> (
    None
):
    model = as_if_trained(widen(tiny_llama(), "preserve"))
    ids = torch.arange(40).view(2, 20)
    with measured_stream_ratios(model) as ratios:
        for half in ids:  # of several forward passes the largest
            model(input_ids=half[None])
    u, x = model.expansion.embed_tokens(ids), model.base.get_input_embeddings()(ids)
    first = (u.pow(2).mean(-1) / (x.pow(2).mean(-1) + model.base.config.rms_norm_eps)).sqrt().max()
    torch.testing.assert_close(ratios["expansion.layers.0.input_layernorm"], first)
    by_layer = layer_ratios(model, ratios)
    assert by_layer.shape == (len(model.expansion.layers) + 1,)
    assert by_layer.max().item() == max(ratio.item() for ratio in ratios.values())
    assert largest_stream_ratio(model, list(ids[:, None])) == by_layer.max().item()
    assert not any(module._forward_pre_hooks for module in model.modules())
