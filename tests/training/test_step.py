from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, MicroBatch, PackedWindows
from scale_cli.errors import NonFiniteError
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
