from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import Interrupted, NonFiniteError, TrainingError
from scale_cli.storage.atomic import load_tensors
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import read_records
from scale_cli.storage.records import TrainState
from scale_cli.training import loop
from scale_cli.training.step import TakenStep, train_step

MakeConfig = Callable[..., RunConfig]


def said_nothing(line: str) -> None:
    """Swallow what a verb would print."""


def break_gradient_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Poison a gradient in the backward pass of some steps (counted from 1), as an overflow would."""

    def step_with_poison(*args: Any, **kwargs: Any) -> TakenStep:
        model, step = args[1], args[3].step
        assert isinstance(model, torch.nn.Module)
        poisoned = [p for p in model.parameters() if p.requires_grad][:1] if step in {s - 1 for s in steps} else []
        hooks = [p.register_hook(lambda gradient: gradient * torch.nan) for p in poisoned]
        try:
            return train_step(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    monkeypatch.setattr(loop, "train_step", step_with_poison)


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_step_batch_and_sources(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    upscale(config)
    break_gradient_at(monkeypatch, 5)
    with pytest.raises(TrainingError) as stopped:
        train(config, None, said_nothing)
    message = str(stopped.value)
    assert "step 5: " in message
    assert "nan" in message
    assert " of petitions (windows " in message
    assert [folder.name for folder in RunFolder(config.output_dir).checkpoints.iterdir()] == ["step-00000003"]
    break_gradient_at(monkeypatch)
    train(config, "auto", said_nothing)  # the last checkpoint holds nothing of it
    trained = load_tensors(RunFolder(config.output_dir).final / "trained.safetensors")
    assert all(tensor.isfinite().all() for tensor in trained.values())


def test_skipped_steps_leave_no_trace_in_the_weights_and_are_counted_over_resumes(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", "train.on_nonfinite=skip", "train.max_skipped_steps=2")
    upscale(config)
    break_gradient_at(monkeypatch, 2, 5, 8)
    with pytest.raises(TrainingError, match="max_skipped_steps 2 are used up"):
        train(config, None, said_nothing)
    break_gradient_at(monkeypatch, 8)
    with pytest.raises(TrainingError, match="used up"):
        train(config, "auto", said_nothing)
    break_gradient_at(monkeypatch)
    summary = train(config, "auto", said_nothing)
    run = RunFolder(config.output_dir)
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, 10))
    assert [record["step"] for record in records if "skipped" in record] == [2, 5]
    assert summary.state.skipped_steps == 2
    num_trained = sum(source.num_trained for source in TokenLedger.load(run.final).sources.values())
    assert num_trained == summary.state.num_tokens + summary.state.skipped_tokens
    assert all(tensor.isfinite().all() for tensor in load_tensors(run.final / "trained.safetensors").values())


@pytest.mark.parametrize("log_every_steps", [2, 5])
def test_what_is_skipped_and_what_stops_does_not_depend_on_how_often_is_logged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, log_every_steps: int
) -> None:
    """Between two records it is not known yet that a step was not finite; a checkpoint in between knows."""
    logged = f"train.log_every_steps={log_every_steps}"
    config = make_config("run", "train.on_nonfinite=skip", "train.max_skipped_steps=2", logged)
    upscale(config)
    break_gradient_at(monkeypatch, 2, 5, 8)
    with pytest.raises(TrainingError, match=r"^step 8: .* of petitions .*max_skipped_steps 2 are used up"):
        train(config, None, said_nothing)
    run = RunFolder(config.output_dir)
    position = TrainState.load(run.checkpoint(6))
    assert (position.step, position.skipped_steps) == (6, 2)
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records if "skipped" in record] == [2, 5]
    assert [record["step"] for record in records if "loss" in record] == [
        step for step in range(1, 8) if step % log_every_steps == 0 and step not in (2, 5)
    ]


def test_a_checkpoint_before_the_first_good_step_is_one_to_resume_from(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.on_nonfinite=skip", "train.save_every_steps=1", "train.max_steps=4")
    whole, cut = (make_config(name, *settings) for name in ("whole", "cut"))
    for config in (whole, cut):
        upscale(config)
    break_gradient_at(monkeypatch, 1)
    train(whole, None, said_nothing)
    limited = cut.model_copy(update={"train": cut.train.model_copy(update={"max_hours": 1e-9})})
    with pytest.raises(Interrupted):
        train(limited, None, said_nothing)
    train(cut, "auto", said_nothing)
    ends = [load_tensors(RunFolder(config.output_dir).final / "trained.safetensors") for config in (whole, cut)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_non_finite_error_is_a_training_error() -> None:
    assert issubclass(NonFiniteError, TrainingError)
    assert NonFiniteError.exit_code == 1


def test_the_warning_of_a_leap_names_its_batch_and_says_what_to_do(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("run")
    upscale(config)

    def leaping(*args: Any, **kwargs: Any) -> TakenStep:
        taken = train_step(*args, **kwargs)
        return dataclasses.replace(taken, figures=10 * taken.figures) if args[3].step == 7 else taken

    monkeypatch.setattr(loop, "train_step", leaping)
    train(config, None, said_nothing)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "warning: step 8: loss" in line]
    assert " of petitions (windows " in told
    assert "train.warmup_steps (now 2)" in told
    assert "train.lr (now 0.003)" in told


def test_a_run_logs_how_large_the_expansion_stream_is_in_every_layer(make_config: MakeConfig) -> None:
    config = make_config("run", "train.log_every_steps=2", "train.activation_checkpointing=true")
    upscale(config)
    train(config, None, said_nothing)
    records = [record for record in read_records(RunFolder(config.output_dir).metrics) if "loss" in record]
    assert [len(record["stream_ratios"]) for record in records] == [3 + 1] * 5
