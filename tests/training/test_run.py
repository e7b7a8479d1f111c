from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, Interrupted, RunFolderError
from scale_cli.storage.atomic import load_tensors
from scale_cli.storage.layout import RunFolder
from scale_cli.training import loop
from scale_cli.training.run import train
from scale_cli.training.step import StepResult, train_step
from scale_cli.upscale.run import upscale

MakeConfig = Callable[..., RunConfig]
# What a metrics record may differ in between two identical runs.
_CLOCK = ("elapsed_s", "tokens_per_s")


def said_nothing(line: str) -> None:
    """Swallow what a verb would print."""


def metrics(run: RunFolder) -> list[dict[str, object]]:
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key not in _CLOCK} for record in records]


def raise_signal_after(monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> None:
    """Send ourselves a signal from inside a step, as a scheduler would."""

    def step_then_signal(*args: object, **kwargs: object) -> StepResult:
        result = train_step(*args, **kwargs)  # type: ignore[arg-type]
        if args[4] == step - 1:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(loop, "train_step", step_then_signal)


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    assert metrics(one) == metrics(other)
    left, right = (load_tensors(run.final / "trained.safetensors") for run in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_interrupted_and_resumed_twice_equals_uninterrupted_bitwise(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = make_config("whole", "train.eval_every_steps=4"), make_config("cut", "train.eval_every_steps=4")
    upscale(whole)
    said: list[str] = []
    train(whole, None, said.append)
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "held-out tiny: 4 of its 4 documents (100.0%) are in tiny, which is trained on" in warning
    upscale(cut)
    for step, number, resume in ((2, signal.SIGTERM, None), (5, signal.SIGINT, "auto")):
        raise_signal_after(monkeypatch, number, step)
        with pytest.raises(Interrupted) as stopped:
            train(cut, resume, said_nothing)
        assert stopped.value.exit_code == 128 + number
        assert RunFolder(cut.output_dir).checkpoint(step).is_dir()
    monkeypatch.setattr(loop, "train_step", train_step)
    train(cut, "auto", said_nothing)
    assert_same_run(RunFolder(whole.output_dir), RunFolder(cut.output_dir))


def test_killed_without_warning_and_resumed_equals_uninterrupted_bitwise(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the last checkpoint are done again; the log shows none of them twice."""
    whole, cut = make_config("whole"), make_config("cut")
    for config in (whole, cut):
        upscale(config)
    train(whole, None, said_nothing)

    class Killed(BaseException):
        """Stands for SIGKILL: nothing of ours handles it."""

    def step_until_killed(*args: object, **kwargs: object) -> StepResult:
        if args[4] == 5:
            raise Killed
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", step_until_killed)
    with pytest.raises(Killed):
        train(cut, None, said_nothing)
    assert [record["step"] for record in metrics(RunFolder(cut.output_dir))] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(loop, "train_step", train_step)
    train(cut, "auto", said_nothing)
    assert_same_run(RunFolder(whole.output_dir), RunFolder(cut.output_dir))


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(make_config: MakeConfig) -> None:
    whole, cut = make_config("whole"), make_config("cut")
    for config in (whole, cut):
        upscale(config)
        train(config, None, said_nothing)
    run = RunFolder(cut.output_dir)
    newest = sorted(run.checkpoints.iterdir())[-1]
    damaged = newest / "optimiser.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(bytes(content))
    run.final.rename(run.root / "put-aside")
    said: list[str] = []
    train(cut, "auto", said.append)
    assert any(newest.name in line and "skipped" in line for line in said)
    assert_same_run(RunFolder(whole.output_dir), run)


def test_resume_auto_with_nothing_to_resume_starts_from_the_beginning(make_config: MakeConfig) -> None:
    config = make_config("run")
    upscale(config)
    assert train(config, "auto", said_nothing).position.step == config.train.max_steps


def test_a_run_that_exists_is_never_overwritten(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("run")
    upscale(config)
    raise_signal_after(monkeypatch, signal.SIGTERM, 1)
    with pytest.raises(Interrupted):
        train(config, None, said_nothing)
    with pytest.raises(RunFolderError, match="--resume auto"):
        train(config, None, said_nothing)
    with pytest.raises(RunFolderError, match="training has begun"):
        upscale(config)
    monkeypatch.setattr(loop, "train_step", train_step)
    train(config, "auto", said_nothing)
    with pytest.raises(RunFolderError, match="finished run"):
        train(config, None, said_nothing)


@pytest.mark.parametrize("override", ["train.lr=1e-4", "seed=1", "corpus.sequence_length=16"])
def test_resuming_with_a_config_that_makes_another_run_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    config = make_config("run")
    upscale(config)
    raise_signal_after(monkeypatch, signal.SIGTERM, 1)
    with pytest.raises(Interrupted):
        train(config, None, said_nothing)
    with pytest.raises(RunFolderError, match=override.partition("=")[0]):
        train(make_config("run", override), "auto", said_nothing)


def test_checkpoints_hold_the_expansion_and_nothing_frozen(make_config: MakeConfig) -> None:
    config = make_config("run")
    summary = upscale(config)
    train(config, None, said_nothing)
    added = {name for name, parameter in summary.model.named_parameters() if parameter.requires_grad}
    assert all(name.startswith("expansion.") for name in added)
    run = RunFolder(config.output_dir)
    kept = sorted(run.checkpoints.iterdir())
    assert [folder.name for folder in kept] == ["step-00000006", "step-00000009"]
    assert set(load_tensors(kept[-1] / "trained.safetensors")) == added
    moments = {name.partition(".")[2] for name in load_tensors(kept[-1] / "optimiser.safetensors")}
    assert moments == added
    assert not [file for file in Path(run.root).rglob("*") if file.suffix in (".pt", ".bin", ".pkl", ".pth")]


def test_text_that_changed_between_two_resumes_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("One text to begin with.\n" * 200, encoding="utf-8")
    config = make_config("run", f"corpus.sources.0.path={text}")
    upscale(config)
    raise_signal_after(monkeypatch, signal.SIGTERM, 1)
    with pytest.raises(Interrupted):
        train(config, None, said_nothing)
    text.write_text("Another text to go on with.\n" * 200, encoding="utf-8")
    with pytest.raises(RunFolderError, match="other text was trained on: petitions-"):
        train(config, "auto", said_nothing)


def test_logged_losses_do_not_hang_on_where_a_run_was_interrupted(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = make_config("whole", "train.log_every_steps=4"), make_config("cut", "train.log_every_steps=4")
    for config in (whole, cut):
        upscale(config)
    train(whole, None, said_nothing)
    raise_signal_after(monkeypatch, signal.SIGTERM, 6)
    with pytest.raises(Interrupted):
        train(cut, None, said_nothing)
    monkeypatch.setattr(loop, "train_step", train_step)
    train(cut, "auto", said_nothing)
    assert_same_run(RunFolder(whole.output_dir), RunFolder(cut.output_dir))


def test_windows_longer_than_the_bases_context_are_refused(make_config: MakeConfig) -> None:
    upscale(make_config("run"))
    longer = make_config("run", "corpus.sequence_length=1024")
    for verb in (upscale, lambda config: train(config, None, said_nothing)):
        with pytest.raises(ConfigError, match=r"corpus\.sequence_length: 1024, but the base has 512"):
            verb(longer)
