"""Losses and gradients that are not finite, that leap, or that overflow float16."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import ConfigError, Interrupted, TrainingError
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import Run
from scale_cli.training.metrics_log import read_records
from scale_cli.training.records import TrainState
from scale_cli.training.step import TakenStep
from tests.small_runs import changed
from tests.training.conftest import (
    MakeConfig,
    are_equal,
    around_steps,
    finished,
    go_on,
    trained,
    upscaled,
)

FP16 = ("train.mixed_precision=fp16", "train.max_steps=6")
SKIPS = ("train.on_nonfinite=skip", "train.max_skipped_steps=2")


def break_gradient_at(
    monkeypatch: pytest.MonkeyPatch, *steps: int, by: float = torch.nan, until: int | None = None
) -> None:
    """Poison a gradient in the backward pass of some steps, counted from 1; break off after the step `until`."""

    def poisoned(done: int, model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        if done == until:
            raise Interrupted("killed", 143)
        if done + 1 not in steps:
            return take()
        parameter = next(p for p in model.parameters() if p.requires_grad)
        hook = parameter.register_hook(lambda gradient: gradient * by)
        taken = take()
        hook.remove()
        return taken

    around_steps(monkeypatch, poisoned)


def steps_with(run: RunFolder, key: str) -> list[int]:
    return [record["step"] for record in read_records(run.metrics) if key in record]


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_step_batch_and_sources(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    run = upscaled(config)
    break_gradient_at(monkeypatch, 5)
    with pytest.raises(TrainingError, match=r"^step 5: .*nan.* of petitions \(windows "):
        train(config, None, print)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-00000003"]
    break_gradient_at(monkeypatch)
    go_on(config)  # the last checkpoint holds nothing of it
    assert all(tensor.isfinite().all() for tensor in trained(run.final).values())


@pytest.mark.parametrize("log_every_steps", [1, 5])
def test_skipped_steps_leave_no_trace_and_are_counted_over_resumes_however_often_is_logged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, log_every_steps: int
) -> None:
    """Between two records it is not known yet that a step was not finite; a checkpoint in between knows."""
    config = make_config("run", *SKIPS, f"train.log_every_steps={log_every_steps}")
    run = upscaled(config)
    for broken in ((2, 5, 8), (8,)):
        break_gradient_at(monkeypatch, *broken)
        with pytest.raises(
            TrainingError, match=r"^step 8: .* of petitions .*max_skipped_steps 2 is reached"
        ):
            train(config, "auto", print)
        position = TrainState.load(run.checkpoint(6))
        assert (position.step, position.skipped_steps) == (6, 2)
    break_gradient_at(monkeypatch)
    state = train(config, "auto", print)
    assert steps_with(run, "skipped") == [2, 5]
    due = [step for step in range(1, 10) if step % log_every_steps == 0 or step == 9]
    assert steps_with(run, "loss") == [step for step in due if step not in (2, 5)]
    assert state.skipped_steps == 2
    counted = sum(tokens.num_trained for tokens in TokenLedger.load(run.final).sources.values())
    assert counted == state.num_tokens + state.skipped_tokens
    assert all(tensor.isfinite().all() for tensor in trained(run.final).values())


def test_a_checkpoint_before_the_first_good_step_is_one_to_resume_from(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.on_nonfinite=skip", "train.save_every_steps=1", "train.max_steps=4")
    whole, cut = (make_config(name, *settings) for name in ("whole", "cut"))
    break_gradient_at(monkeypatch, 1)
    run = upscaled(cut)
    with pytest.raises(Interrupted):
        train(changed(cut, "train.max_hours=1e-9"), None, print)
    go_on(cut)
    assert are_equal(trained(run.final), trained(finished(whole).final))


def test_a_leap_is_warned_of_by_its_batch_and_the_log_says_how_large_the_expansion_stream_is_in_every_layer(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leaping(done: int, _model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        taken = take()
        return dataclasses.replace(taken, figures=10 * taken.figures) if done == 7 else taken

    around_steps(monkeypatch, leaping)
    run = finished(make_config("run", "train.activation_checkpointing=true"))
    (told,) = re.findall(r"warning: step 8: loss .*", capsys.readouterr().err)
    for part in (" of petitions (windows ", "train.warmup_steps (now 2)", "train.lr (now 0.003)"):
        assert part in told
    assert [len(record["stream_ratios"]) for record in read_records(run.metrics)] == [3 + 1] * 9


def test_overflows_lower_the_scale_are_left_out_and_a_resumed_run_ends_in_the_same_bits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (make_config(name, *FP16) for name in ("whole", "cut"))
    assert Run(whole).config.evaluation.mixed_precision == "fp16"
    runs = [upscaled(config) for config in (whole, cut)]
    break_gradient_at(monkeypatch, 2, 5, by=torch.inf)
    state = train(whole, None, print)
    break_gradient_at(monkeypatch, 2, 5, by=torch.inf, until=4)
    with pytest.raises(Interrupted):
        train(cut, None, print)
    assert TrainState.load(runs[1].checkpoint(3)).loss_scale not in (None, 2.0**16)
    break_gradient_at(monkeypatch, 2, 5, by=torch.inf)
    go_on(cut)
    assert are_equal(trained(runs[0].final), trained(runs[1].final))
    # `on_nonfinite: stop` has nothing to say of them.
    assert (state.skipped_steps, state.step) == (0, 6)
    counted = sum(tokens.num_trained for tokens in TokenLedger.load(runs[0].final).sources.values())
    assert counted == state.num_tokens + state.skipped_tokens
    left_out = [record for record in read_records(runs[1].metrics) if "skipped" in record]
    assert {2, 5} <= {record["step"] for record in left_out}
    assert left_out[0]["skipped"].endswith("overflowed float16 under a loss scale of 65536")
    assert state.loss_scale == 2.0 ** (16 - len(left_out))


def test_a_resumed_run_raises_the_loss_scale_at_the_same_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = partial(torch.amp.GradScaler, init_scale=1024.0, growth_interval=4)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    whole, cut = (make_config(name, *FP16) for name in ("whole", "cut"))
    run = upscaled(cut)
    break_gradient_at(monkeypatch, until=4)
    with pytest.raises(Interrupted):
        train(cut, None, print)
    break_gradient_at(monkeypatch)
    go_on(cut)
    for folder in (finished(whole).final, run.final):
        state = TrainState.load(folder)
        assert (state.loss_scale, state.loss_scale_steps) == (2048.0, 2)


def test_a_float16_base_trains_under_float16_autocast_alone(make_config: MakeConfig) -> None:
    config = make_config("run", *FP16, "train.max_steps=2", "model.dtype=float16")
    run = upscaled(config)  # which proves the base's logits
    train(config, None, print)
    for tensor in trained(run.final).values():
        assert tensor.isfinite().all() and tensor.dtype == torch.float32
    for other in ("model.dtype=bfloat16", "train.sharding=all"):
        with pytest.raises(ConfigError, match=r"train.mixed_precision: fp16"):
            make_config("other", *FP16, other)
