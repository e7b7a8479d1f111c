from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.commands.plan import plan
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.errors import (
    Interrupted,
    OutOfMemory,
    PreservationError,
    RunFolderError,
    StorageError,
    TrainingError,
)
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.report.numbers import quantity
from scale_cli.storage import atomic
from scale_cli.storage.atomic import file_sha256, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import TrainState
from scale_cli.training import checkpoint, loop
from scale_cli.training.checkpoint import Snapshot, take_snapshot, write_checkpoint
from scale_cli.training.step import TakenStep, train_step

MakeConfig = Callable[..., RunConfig]
_PATIENCE_S = 60


def said_nothing(line: str) -> None:
    """Swallow what a verb would print."""


def before_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any], object]) -> None:
    """Call something with the number of steps done and the model, before every step."""

    def step(*args: Any, **kwargs: Any) -> TakenStep:
        act(args[3].step, args[1])
        return train_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", step)


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_before_them(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3's checkpoint is not written before step 5 is done: training would wait for ever for it."""
    whole, delayed = make_config("whole"), make_config("delayed")
    for config in (whole, delayed):
        upscale(config)
    train(whole, None, said_nothing)
    five_steps_done = threading.Event()

    def write_later(run: Any, state: TrainState, snapshot: Any) -> None:
        assert five_steps_done.wait(_PATIENCE_S)
        write_checkpoint(run, state, snapshot)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write_later)
    before_each_step(monkeypatch, lambda done, _: five_steps_done.set() if done == 5 else None)
    kept = delayed.model_copy(update={"train": delayed.train.model_copy(update={"keep_checkpoints": 9})})
    train(kept, None, said_nothing)
    run = RunFolder(delayed.output_dir)
    monkeypatch.undo()
    for folder in (run.final, run.checkpoint(9), run.checkpoint(6)):
        (run.root / "aside").mkdir(exist_ok=True)
        folder.rename(run.root / "aside" / folder.name)
    train(delayed, "auto", said_nothing)  # from step 3
    ends = [(RunFolder(c.output_dir).final / "trained.safetensors").read_bytes() for c in (whole, delayed)]
    assert ends[0] == ends[1]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    upscale(config)

    def write_once(run: Any, state: TrainState, snapshot: Any) -> None:
        if state.step > 3:
            raise StorageError("no room")
        write_checkpoint(run, state, snapshot)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write_once)
    with pytest.raises(StorageError, match="no room"):
        train(config, None, said_nothing)
    run = RunFolder(config.output_dir)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-00000003"]
    verify_folder(run.checkpoint(3))
    assert not run.final.exists()


def test_a_base_that_changes_while_it_trains_is_found_and_nothing_more_is_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    upscale(config)

    def flip_a_bit(done: int, wrapped: Any) -> None:
        if done == 4:
            model = next(module for module in wrapped.modules() if isinstance(module, ScaleForCausalLM))
            with torch.no_grad():
                model.base.model.norm.weight[0] *= -1

    before_each_step(monkeypatch, flip_a_bit)
    with pytest.raises(PreservationError, match=r"step 6: the base has changed: model\.norm\.weight"):
        train(config, None, said_nothing)
    assert [folder.name for folder in RunFolder(config.output_dir).checkpoints.iterdir()] == ["step-00000003"]


def test_a_step_that_has_a_checkpoint_is_not_saved_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", "train.max_hours=1e-9", "train.save_every_steps=1", "train.max_steps=3")
    upscale(config)
    saved: list[int] = []

    def write(run: Any, state: TrainState, snapshot: Any) -> None:
        saved.append(state.step)
        write_checkpoint(run, state, snapshot)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(config, "auto", said_nothing)
    train(config, "auto", said_nothing)
    assert saved == [1, 2, 3]
    assert json.loads((config.output_dir / "final" / "cost.json").read_text(encoding="utf-8"))["saving_s"] >= 0


class SlowToFree(dict[str, Any]):
    """What takes a while to be freed, as many tensors do."""

    def __del__(self) -> None:
        time.sleep(0.2)


def test_no_thread_of_a_run_outlives_it(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that frees tensors while the interpreter ends aborts the process, after the error's good line."""
    config = make_config("run")
    upscale(config)

    def take(*args: Any) -> Snapshot:
        return SlowToFree(take_snapshot(*args))

    def fail(done: int, _: Any) -> None:
        if done == 4:
            raise TrainingError("it diverges")

    monkeypatch.setattr(checkpoint, "take_snapshot", take)
    before_each_step(monkeypatch, fail)
    with pytest.raises(TrainingError, match="it diverges"):
        train(config, None, said_nothing)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("checkpoint", "prefetch"))] == []
    verify_folder(RunFolder(config.output_dir).checkpoint(3))


def test_out_of_memory_is_one_line_that_says_what_to_lower_and_what_was_planned(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    upscale(config)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 GiB free.")

    before_each_step(monkeypatch, fail)
    with pytest.raises(OutOfMemory) as ended:
        train(config, None, said_nothing)
    told = str(ended.value)
    planned = plan(config, 1e12, 1).methods[0].memory.total
    for part in ("micro_batch_size (now 4)", "activation_checkpointing", "Tried to allocate", quantity(planned, "B")):
        assert part in told
    assert told.isprintable()


@pytest.mark.parametrize("resume", ["auto", "step"])
def test_a_resume_reads_a_checkpoint_through_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    config = make_config("run", "train.max_hours=1e-9")
    upscale(config)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(config, "auto", said_nothing)
    newest = RunFolder(config.output_dir).checkpoint(2)
    hashed: list[Path] = []

    def sha256(path: Path) -> str:
        hashed.append(path)
        return file_sha256(path)

    monkeypatch.setattr(atomic, "file_sha256", sha256)
    with pytest.raises(Interrupted):
        train(config, "auto" if resume == "auto" else str(newest), said_nothing)
    read = [path.name for path in hashed if path.parent == newest]
    assert sorted(read) == sorted(file.name for file in newest.iterdir() if file.name != "manifest.json")


def test_a_run_in_which_another_process_trains_is_refused(make_config: MakeConfig) -> None:
    config = make_config("run")
    upscale(config)
    descriptor = os.open(config.output_dir, os.O_RDONLY)  # a lock of its own, as another process has
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(RunFolderError, match="another process is at work here"):
        train(config, None, said_nothing)
    os.close(descriptor)
    train(config, None, said_nothing)
