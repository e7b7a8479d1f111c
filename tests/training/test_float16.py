"""float16 by autocast: the loss is scaled; the scale learns of overflows, and is resumed with the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.amp import GradScaler

from scale_cli.commands.train import train
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import ConfigError, GradientOverflow, Interrupted, NonFiniteError
from scale_cli.storage.records import TrainState, read_records
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import TakenStep, train_step
from tests.training.conftest import MakeConfig, are_equal, around_steps, go_on, trained, upscaled
from tests.training.test_step import batches_of, settings
from tests.widening import tiny_llama

FP16 = ("train.mixed_precision=fp16", "train.max_steps=6")


def overflow_at(monkeypatch: pytest.MonkeyPatch, *steps: int, until: int = 9) -> None:
    """Let a gradient of some steps (counted from 1) be infinite, and break off before the step after `until`."""

    def overflowing(done: int, model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        if done == until:
            raise Interrupted("killed", 143)
        parameter = next(p for p in model.parameters() if p.requires_grad)
        hook = parameter.register_hook(lambda gradient: gradient * (torch.inf if done + 1 in steps else 1.0))
        taken = take()
        hook.remove()
        return taken

    around_steps(monkeypatch, overflowing)


def test_overflows_lower_the_scale_are_left_out_and_a_resumed_run_ends_in_the_same_bits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (make_config(name, *FP16) for name in ("whole", "cut"))
    assert whole.evaluation.mixed_precision == "fp16"
    runs = [upscaled(config) for config in (whole, cut)]
    overflow_at(monkeypatch, 2, 5)
    state = train(whole, None, print)
    overflow_at(monkeypatch, 2, 5, until=4)
    with pytest.raises(Interrupted):
        train(cut, None, print)
    assert TrainState.load(runs[1].checkpoint(3)).loss_scale not in (None, 2.0**16)
    overflow_at(monkeypatch, 2, 5)
    go_on(cut)
    assert are_equal(trained(runs[0].final), trained(runs[1].final))
    assert (state.skipped_steps, state.step) == (0, 6)  # `on_nonfinite: stop` has nothing to say of them
    counted = sum(tokens.num_trained for tokens in TokenLedger.load(runs[0].final).sources.values())
    assert counted == state.num_tokens + state.skipped_tokens
    left_out = [record for record in read_records(runs[1].metrics) if "skipped" in record]
    assert {2, 5} <= {record["step"] for record in left_out}
    assert left_out[0]["skipped"].endswith("overflowed float16 under a loss scale of 65536")
    assert state.loss_scale == 2.0 ** (16 - len(left_out))


def test_a_scaled_loss_gives_the_gradients_of_the_loss_and_the_scale_grows_where_nothing_overflows() -> None:
    """A power of two is exact in float32: no bit of the weights hangs on it."""
    ends, scaler = [], GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for of_run in (scaler, GradScaler(enabled=False)):
        model, plan = tiny_llama(vocab_size=64).requires_grad_(True), settings(1e-2, max_grad_norm=1.0)
        optimiser = build_optimiser(model, plan)
        for step in range(3):
            batch = batches_of(4).of_step(step)
            train_step(Accelerator(cpu=True), model, optimiser, batch, plan, scaler=of_run).result()
        ends.append(dict(model.state_dict()))
    assert are_equal(*ends)
    assert scaler.get_scale() == 2.0**11


@pytest.mark.parametrize(("scale", "error"), [(2.0, GradientOverflow), (1.0, NonFiniteError)])
def test_what_is_not_finite_under_no_scale_either_is_no_overflow(scale: float, error: type[Exception]) -> None:
    model, plan = tiny_llama(vocab_size=64).requires_grad_(True), settings(1e-2)
    model.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = GradScaler("cpu", init_scale=scale)
    batch = batches_of(8).of_step(0)
    taken = train_step(Accelerator(cpu=True), model, build_optimiser(model, plan), batch, plan, scaler=scaler)
    with pytest.raises(NonFiniteError) as caught:
        taken.result()
    assert type(caught.value) is error
    assert are_equal(before, dict(model.state_dict()))
    assert scaler.get_scale() == scale / 2


def test_a_float16_base_trains_under_float16_autocast_alone(make_config: MakeConfig) -> None:
    config = make_config("run", *FP16, "train.max_steps=2", "model.dtype=float16")
    run = upscaled(config)  # which proves the base's logits
    train(config, None, print)
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in trained(run.final).values())
    for other in ("model.dtype=bfloat16", "train.sharding=all"):
        with pytest.raises(ConfigError, match=r"train.mixed_precision: fp16"):
            make_config("other", *FP16, other)
