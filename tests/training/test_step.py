"""One optimiser step: AdamW or Muon, whole or with autocast, and what it does where numbers are not finite."""

import copy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as cases
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import GradientOverflow, NonFiniteError
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.training import optimiser as training_optimiser
from scale_cli.training.interruption import StopNow
from scale_cli.training.optimiser import (
    build_optimiser,
    optimiser_tensors,
    orthogonalised,
    rates_of,
    set_learning_rate,
)
from scale_cli.upscale.building import start_model
from tests.steps import Steps, batches_of
from tests.training.conftest import are_equal
from tests.widening import tiny_llama


def settings(lr: float, max_grad_norm: float = 1e9) -> TrainConfig:
    return TrainConfig(max_steps=20, lr=lr, schedule="constant", max_grad_norm=max_grad_norm)


MUON = TrainConfig(max_steps=8, optimiser="muon", lr=1e-2, mixed_precision="bf16")


def give_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in trainable_parameters(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


@pytest.mark.parametrize("variant", ["adapt", "full", "lora", "llama-pro"])
def test_muon_moves_matrices_as_torchs_and_the_rest_as_adamw_and_a_first_step_that_is_not_finite_is_none(
    variant: str,
) -> None:
    model = start_model(
        tiny_llama(vocab_size=64), MethodConfig.model_validate({"variant": variant}), 0
    )
    others = [copy.deepcopy(model) for _ in range(2)]
    start = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
    matrices = [
        parameter
        for name, parameter in trainable_parameters(others[0]).items()
        if is_matrix(name, parameter)
    ]
    muon = torch.optim.Muon(
        matrices, weight_decay=MUON.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    muon.param_groups[0]["lr_multiplier"] = rates_of(model, MUON)["matrix"]
    adamw = build_optimiser(others[1], TrainConfig(max_steps=8, optimiser="adamw", lr=1e-2))
    optimiser = build_optimiser(model, MUON)

    def take_step(found_inf: float) -> None:
        optimiser.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]  # as a gradient scaler would
        optimiser.step()

    give_gradients(model, 0, torch.nan)
    take_step(1.0)
    assert are_equal(dict(model.state_dict()), dict(others[0].state_dict()))
    assert not any(tensor.any() for tensor in optimiser_tensors(optimiser, model).values())
    for step, lr in enumerate((1e-2, 3e-3, 1e-3)):
        for subject, optim in ((model, optimiser), (others[0], muon), (others[1], adamw)):
            give_gradients(subject, step)
            set_learning_rate(optim, lr)
        take_step(0.0)
        muon.step()
        adamw.step()
    by_muon, by_adamw = (trainable_parameters(other) for other in others)
    for name, parameter in trainable_parameters(model).items():
        if is_matrix(name, parameter):
            changes = by_muon[name] - start[name]
            assert (parameter - by_muon[name]).norm() < 0.02 * changes.norm(), name
        else:
            assert torch.equal(parameter, by_adamw[name]), name


@cases(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.floats(1e-4, 1e3))
def test_matrices_orthogonalised_together_are_what_torchs_muon_makes_of_each(
    number: int, num_rows: int, num_columns: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(number)
    matrices = scale * torch.randn(number, num_rows, num_columns, generator=generator)
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    of_steps = (muon["ns_coefficients"], muon["ns_steps"], muon["eps"])
    together = orthogonalised(matrices.bfloat16(), *of_steps)
    for ours, matrix in zip(together, matrices, strict=True):
        torchs = _zeropower_via_newtonschulz(matrix, *of_steps)
        assert (ours - torchs).norm() < 0.03 * torchs.norm()


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_muons_products_are_in_the_precision_of_the_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    """A CPU without instructions for bfloat16 needs many times as long for products in it."""
    seen: list[torch.dtype] = []

    def watched(matrices_BMN: Tensor, *of_steps: Any) -> Tensor:
        seen.append(matrices_BMN.dtype)
        return orthogonalised(matrices_BMN, *of_steps)

    monkeypatch.setattr(training_optimiser, "orthogonalised", watched)
    model = start_model(tiny_llama(vocab_size=64), MethodConfig(variant="route"), 0)
    optimiser = build_optimiser(model, MUON.model_copy(update={"mixed_precision": precision}))
    give_gradients(model, step=0)
    optimiser.step()
    assert set(seen) == {dtype}


def test_sharded_matrices_have_the_bits_that_muon_gives_whole_ones() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = subprocess.run(
        [sys.executable, *words, "-m", "tests.training.muon_in_processes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("optimiser_name", ["adamw", "muon"])
def test_a_step_never_waits_for_its_device_and_a_bad_one_leaves_every_bit_as_it_was(
    monkeypatch: pytest.MonkeyPatch, optimiser_name: str
) -> None:
    """What makes a process wait is a read of a tensor's value; plain models read one a forward.

    In those transformers looks for the ends of documents, in positions that it has counted itself.
    """
    method = MethodConfig.model_validate({"variant": "route", "collaboration": {"layers": "top:1"}})
    model = start_model(tiny_llama(vocab_size=64), method, 0)
    keys = {"max_steps": 20, "lr": 1e-2, "optimiser": optimiser_name}
    train = TrainConfig.model_validate({**keys, "embedding_norm": "bounded"})
    steps = Steps(model, train, batches_of(4))
    trained = trainable_parameters(model)
    steps.take(0).result()

    def state() -> dict[str, torch.Tensor]:
        tensors = trained | optimiser_tensors(steps.optimiser, model)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def read(_: torch.Tensor) -> bool:
        raise AssertionError("waits for the device")

    before = state()
    poison = next(iter(trained.values())).register_hook(lambda gradient: gradient * torch.nan)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__"):
            patch.setattr(torch.Tensor, name, read)
        bad, between = steps.take(1), state()
        poison.remove()
        good = steps.take(2)
    assert are_equal(between, before)
    with pytest.raises(NonFiniteError, match="step 2: "):
        bad.result()
    assert good.result().loss > 0
    assert not are_equal(state(), before)


def test_a_stop_after_the_last_micro_batch_ends_the_step_before_its_update() -> None:
    model = tiny_llama().requires_grad_(True)
    steps = Steps(model, settings(1e-2), batches_of(micro_batch_size=8))
    before = copy.deepcopy(model.state_dict())

    def stop() -> None:
        raise StopNow

    with pytest.raises(StopNow):
        steps.take(0, between_micro_batches=stop)
    assert are_equal(model.state_dict(), before)


def test_a_scaled_loss_gives_the_gradients_of_the_loss_and_the_scale_grows_where_nothing_overflows() -> (
    None
):
    """A power of two is exact in float32: no bit of the weights hangs on it."""
    ends, scaler = [], GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for of_run in (scaler, GradScaler(enabled=False)):
        model = tiny_llama(vocab_size=64).requires_grad_(True)
        steps = Steps(model, settings(1e-2, max_grad_norm=1.0), batches_of(4), wrapped=model)
        for step in range(3):
            steps.take(step, scaler=of_run).result()
        ends.append(dict(model.state_dict()))
    assert are_equal(*ends)
    assert scaler.get_scale() == 2.0**11


@pytest.mark.parametrize(("scale", "error"), [(2.0, GradientOverflow), (1.0, NonFiniteError)])
def test_what_is_not_finite_under_no_scale_either_is_no_overflow(
    scale: float, error: type[Exception]
) -> None:
    model = tiny_llama(vocab_size=64).requires_grad_(True)
    steps = Steps(model, settings(1e-2), batches_of(8), wrapped=model)
    model.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = GradScaler("cpu", init_scale=scale)
    with pytest.raises(NonFiniteError) as caught:
        steps.take(0, scaler=scaler).result()
    assert type(caught.value) is error
    assert are_equal(before, dict(model.state_dict()))
    assert scaler.get_scale() == scale / 2


class CopiesOf(TorchDispatchMode):
    """Notes every tensor that has the shape of one of some weights, or of its transpose, and is none of them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(shape) for w in weights for shape in (w.shape, w.shape[::-1])}
        self.storages = {w.untyped_storage().data_ptr() for w in weights}
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_a_shape = isinstance(result, Tensor) and tuple(result.shape) in self.shapes
        if of_a_shape and result.untyped_storage().data_ptr() not in self.storages:
            self.made.append(f"{func}: {result.dtype} {tuple(result.shape)}")
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("variant", ["preserve", "adapt", "lora"])
def test_a_frozen_base_in_16_bits_is_never_copied_and_what_trains_is_held_in_float32(
    variant: str, mixed_precision: Any, checkpointing: bool
) -> None:
    # Sizes at which no block of the expansion has the shape of one of the base's weights; 14 tokens at once.
    dtype = torch.float16 if mixed_precision == "fp16" else torch.bfloat16
    whole: Any = tiny_llama(num_key_value_heads=4)
    base = whole.to(dtype)
    frozen = [parameter for parameter in base.parameters() if parameter.ndim == 2]
    method = MethodConfig.model_validate({"variant": variant, "lora": {"rank": 2}})
    model = start_model(base, method, seed=0)
    train = TrainConfig(
        max_steps=2,
        lr=1e-3,
        mixed_precision=mixed_precision,
        activation_checkpointing=checkpointing,
    )
    steps = Steps(model, train, batches_of(2, 4, window=7))
    with CopiesOf(frozen) as copies:
        for step in range(2):
            steps.take(step)
    assert copies.made == []
    assert {weight.dtype for weight in frozen} == {dtype}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = steps.optimiser.state.values()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in (*trained, *moments)} == {torch.float32}
    num_trained = sum(parameter.numel() for parameter in trained)
    assert sum(moment.nbytes for moment in moments) == 8 * num_trained
