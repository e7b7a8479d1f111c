"""Losses and gradients that are not finite, or that leap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import Interrupted, TrainingError
from scale_cli.storage.records import RunFolder, TrainState, read_records
from scale_cli.training.step import TakenStep
from tests.training.conftest import MakeConfig, are_equal, around_steps, finished, go_on, trained, upscaled

SKIPS = ("train.on_nonfinite=skip", "train.max_skipped_steps=2")


def break_gradient_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Poison a gradient in the backward pass of some steps (counted from 1), as an overflow would."""

    def poisoned(done: int, model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        if done + 1 not in steps:
            return take()
        parameter = next(p for p in model.parameters() if p.requires_grad)
        hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
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


@pytest.mark.parametrize("log_every_steps", [1, 2, 5])
def test_skipped_steps_leave_no_trace_and_are_counted_over_resumes_however_often_is_logged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, log_every_steps: int
) -> None:
    """Between two records it is not known yet that a step was not finite; a checkpoint in between knows."""
    config = make_config("run", *SKIPS, f"train.log_every_steps={log_every_steps}")
    run = upscaled(config)
    for broken in ((2, 5, 8), (8,)):
        break_gradient_at(monkeypatch, *broken)
        with pytest.raises(TrainingError, match=r"^step 8: .* of petitions .*max_skipped_steps 2 are used up"):
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
        train(cut.model_copy(update={"train": cut.train.model_copy(update={"max_hours": 1e-9})}), None, print)
    go_on(cut)
    assert are_equal(trained(run.final), trained(finished(whole).final))


def test_the_warning_of_a_leap_names_its_batch_and_says_what_to_do(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leaping(done: int, _model: Any, take: Callable[[], TakenStep]) -> TakenStep:
        taken = take()
        return dataclasses.replace(taken, figures=10 * taken.figures) if done == 7 else taken

    around_steps(monkeypatch, leaping)
    finished(make_config("run"))
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: step")]
    assert told.startswith("warning: step 8: loss ")
    for part in (" of petitions (windows ", "train.warmup_steps (now 2)", "train.lr (now 0.003)"):
        assert part in told


def test_a_run_logs_how_large_the_expansion_stream_is_in_every_layer(make_config: MakeConfig) -> None:
    run = finished(make_config("run", "train.log_every_steps=2", "train.activation_checkpointing=true"))
    records = [record for record in read_records(run.metrics) if "loss" in record]
    assert [len(record["stream_ratios"]) for record in records] == [3 + 1] * 5
