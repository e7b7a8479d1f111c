from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, MicroBatch, PackedWindows
from scale_cli.errors import NonFiniteError, TrainingError
from scale_cli.training.optimiser import (
    build_optimiser,
    optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.step import StepResult, loss_share, train_step
from scale_cli.upscale.method import start_model
from scale_cli.upscale.objective import for_training
from tests.hooks import hooks_for
from tests.widening import as_if_trained, tiny_llama, widen


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(sizes)


def batches_of(micro_batch_size: int, length: int = 301) -> Batches:
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(1)).numpy()
    return Batches(
        # 300 targets in windows of 16: the last window has 12, so micro-batches differ in their number of targets.
        [PackedWindows(ids, 16)],
        [1.0],
        num_steps=20,
        seed=0,
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
    )


def settings(lr: float, max_grad_norm: float = 1e9) -> TrainConfig:
    return TrainConfig(max_steps=20, lr=lr, schedule="constant", max_grad_norm=max_grad_norm)


def step(model: torch.nn.Module, batches: Batches, index: int = 0, lr: float = 1e-2) -> StepResult:
    train = settings(lr=lr)
    return train_step(
        Accelerator(cpu=True), model, build_optimiser(model, train), batches.of_step(index), train
    ).result()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_gradient_accumulation_equals_the_large_batch(model: LlamaForCausalLM, micro_batch_size: int) -> None:
    partial = [i for i in range(20) if sum(batches_of(8).num_targets(i)) < 8 * 16]
    assert partial, "some batch holds the short window"
    accumulated, whole = copy.deepcopy(model), copy.deepcopy(model)
    cut_up = step(accumulated, batches_of(micro_batch_size), partial[0])
    at_once = step(whole, batches_of(8), partial[0])
    assert cut_up.num_tokens == at_once.num_tokens
    assert cut_up.loss == pytest.approx(at_once.loss, rel=1e-6)
    assert cut_up.grad_norm == pytest.approx(at_once.grad_norm, rel=1e-5)
    # A fresh Adam moves every weight by lr times the sign of its gradient, whatever its size.
    for one, other in zip(accumulated.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0.0)


def mixed(micro_batch_size: int, weight: float, *lengths: int) -> Batches:
    """A step of two sources, the second of which is distilled."""
    streams = [
        torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(length)).numpy() for length in lengths
    ]
    return Batches(
        [PackedWindows(stream, 16) for stream in streams],
        [1.0, 1.0],
        num_steps=1,
        distillation=[0.0, weight],
        seed=0,
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
    )


def test_distillation_is_the_same_however_the_batch_is_cut_up_and_over_processes() -> None:
    model = as_if_trained(widen(tiny_llama(), "preserve")).train()
    results = [step(copy.deepcopy(model), mixed(size, 2.0, 301, 300)) for size in (8, 4, 2, 1)]
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
    assert results[0].loss > step(copy.deepcopy(model), mixed(8, 0.0, 301, 300)).loss
    of_two = mixed(2, 2.0, 301, 300)
    shares = [
        loss_share(model, batch, torch.device("cpu"), sum(of_two.num_targets(0))).item()
        for rank in range(2)
        for batch in of_two.micro_batches(0, rank, 2)
    ]
    assert sum(shares) == pytest.approx(results[0].loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["widened, distilled", "plain"])
def test_every_source_has_the_loss_of_its_own_tokens_however_the_batch_is_cut_up(kind: str) -> None:
    plain, distilled = tiny_llama().requires_grad_(True), 2.0 * (kind != "plain")
    model = plain if kind == "plain" else as_if_trained(widen(plain, "preserve")).train()
    whole = mixed(8, distilled, 301, 40)
    results = [
        step(for_training(copy.deepcopy(model), settings(1e-2)), mixed(size, distilled, 301, 40)) for size in (8, 2, 1)
    ]
    (batch,) = whole.micro_batches(0)
    expected = []
    for source in (0, 1):
        own = batch.sources == source
        weights = tuple(distilled * source for _ in range(own.sum())) if distilled else None
        alone = MicroBatch(batch.input_ids[own], batch.targets[own], batch.sources[own], distillation=weights)
        expected.append(loss_share(for_training(model, settings(1e-2)), alone, torch.device("cpu"), 1).item())
    assert min(whole.num_targets(0)) > 0
    for result in results:
        assert [num for _, num in result.by_source] == list(whole.num_targets(0))
        assert [loss for loss, _ in result.by_source] == pytest.approx(expected, rel=1e-5)
        assert sum(loss for loss, _ in result.by_source) == pytest.approx(result.loss * result.num_tokens, rel=1e-5)


def test_loss_is_transformers_own_mean_over_target_tokens(model: LlamaForCausalLM) -> None:
    batches = batches_of(8)
    (micro_batch,) = batches.micro_batches(0)
    with torch.no_grad():
        logits = model(micro_batch.input_ids).logits
        expected = model.loss_function(
            logits=logits, labels=None, shift_labels=micro_batch.targets, vocab_size=model.config.vocab_size
        )
    assert step(model, batches).loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_that_is_not_finite_updates_nothing_and_names_itself(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TrainingError, match="step 6"):
        step(model, batches_of(8), 5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("optimiser_name", ["adamw", "muon"])
def test_a_step_never_waits_for_its_device_and_a_bad_one_leaves_every_bit_as_it_was(
    monkeypatch: pytest.MonkeyPatch, optimiser_name: str
) -> None:
    """What makes a process wait is a read of a tensor's value; plain models read one a forward.

    In those transformers looks for the ends of documents, in positions that it has counted itself.
    """
    method = MethodConfig.model_validate({"variant": "route", "collaboration": {"layers": "top:1"}})
    model = start_model(tiny_llama(vocab_size=64), method, 0)
    anchors = {"decay_to_base": True, "lookahead": {"every_steps": 4}}
    train = TrainConfig.model_validate({"max_steps": 20, "lr": 1e-2, "optimiser": optimiser_name, **anchors})
    wrapped, optimiser = for_training(model, train), build_optimiser(model, train)
    hooks = hooks_for(model, train)
    trained = trainable_parameters(model)
    train_step(Accelerator(cpu=True), wrapped, optimiser, batches_of(4).of_step(0), train, hooks=hooks).result()

    def state() -> dict[str, torch.Tensor]:
        return {name: t.detach().clone() for name, t in (trained | optimiser_tensors(optimiser, model)).items()}

    def read(_: torch.Tensor) -> bool:
        raise AssertionError("waits for the device")

    before = state()
    poison = next(iter(trained.values())).register_hook(lambda gradient: gradient * torch.nan)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__"):
            patch.setattr(torch.Tensor, name, read)
        bad = train_step(Accelerator(cpu=True), wrapped, optimiser, batches_of(4).of_step(1), train, hooks=hooks)
        between = state()
        poison.remove()
        good = train_step(Accelerator(cpu=True), wrapped, optimiser, batches_of(4).of_step(2), train, hooks=hooks)
    assert all(torch.equal(between[name], tensor) for name, tensor in before.items())
    with pytest.raises(NonFiniteError, match="step 2: "):
        bad.result()
    assert good.result().loss > 0
    assert not all(torch.equal(state()[name], tensor) for name, tensor in before.items())


def test_clipping_bounds_what_reaches_the_optimiser(model: LlamaForCausalLM) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = train_step(Accelerator(cpu=True), model, optimiser, batches_of(8).of_step(0), settings(1.0, 0.01)).result()
    moved = torch.stack([(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert result.grad_norm > 0.01
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_spares_embeddings_and_gains(model: LlamaForCausalLM) -> None:
    optimiser = build_optimiser(model, TrainConfig(max_steps=1, weight_decay=0.1))
    decayed = {id(p) for group in optimiser.param_groups if group["weight_decay"] for p in group["params"]}
    spared = {name for name, parameter in model.named_parameters() if id(parameter) not in decayed}
    assert spared == {name for name in dict(model.named_parameters()) if "norm" in name or "embed" in name}
