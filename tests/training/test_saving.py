"""Checkpoints are written beside the loop, and whatever goes wrong with one is said."""

import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.errors import (
    Interrupted,
    OutOfMemory,
    PreservationError,
    RunFolderError,
    TrainingError,
)
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.runs.folder import TRAINED
from scale_cli.storage import atomic
from scale_cli.storage.atomic import file_sha256, verify_folder
from scale_cli.training import training_run
from scale_cli.training.records import TrainState
from scale_cli.training.training_run import Snapshot, take_snapshot, write_checkpoint
from tests.training.conftest import MakeConfig, before_each_step, finished, go_on, upscaled

_PATIENCE_S = 60


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_before_them(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3's checkpoint is not written before step 5 is done: training would wait for ever for it."""
    whole = finished(make_config("whole"))
    delayed = make_config("delayed", "train.keep_checkpoints=9")
    five_steps_done = threading.Event()

    def write_later(run: Any, state: TrainState, snapshot: Any) -> None:
        assert five_steps_done.wait(_PATIENCE_S)
        write_checkpoint(run, state, snapshot)

    monkeypatch.setattr(training_run, "write_checkpoint", write_later)
    before_each_step(monkeypatch, lambda done, _: five_steps_done.set() if done == 5 else None)
    run = finished(delayed)
    monkeypatch.undo()
    for folder in (run.final, run.checkpoint(9), run.checkpoint(6)):
        folder.rename(run.root / f"aside-{folder.name}")
    go_on(delayed)  # from step 3
    assert file_sha256(run.final / TRAINED) == file_sha256(whole.final / TRAINED)


@pytest.mark.parametrize(("counted", "found_at"), [(True, 6), (False, 9)])
def test_a_base_that_is_written_to_is_found_at_the_next_checkpoint_or_by_its_hash_at_the_end(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, counted: bool, found_at: int
) -> None:
    """What is written to `.data` torch does not count."""
    config = make_config("run")
    run = upscaled(config)

    @torch.no_grad()
    def flip_a_bit(done: int, wrapped: Any) -> None:
        if done == 4:
            models = [m for m in wrapped.modules() if isinstance(m, ScaleForCausalLM)]
            gains = models[0].base.model.norm.weight
            (gains if counted else gains.data)[0] *= -1

    before_each_step(monkeypatch, flip_a_bit)
    told = rf"step {found_at}: the base has changed: model\.norm\.weight"
    with pytest.raises(PreservationError, match=told):
        train(config, None, print)
    assert not run.final.exists()
    saved = [3] if counted else [6, 9]
    assert sorted(run.checkpoints.iterdir()) == [run.checkpoint(step) for step in saved]


class SlowToFree(dict[str, Any]):
    """What takes a while to be freed, as many tensors do."""

    def __del__(self) -> None:
        time.sleep(0.2)


def test_no_thread_of_a_run_outlives_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that frees tensors while the interpreter ends aborts the process, after the error's good line."""
    config = make_config("run")
    run = upscaled(config)

    def take(*args: Any) -> Snapshot:
        snapshot = take_snapshot(*args)
        return replace(snapshot, files=SlowToFree(snapshot.files))

    def fail(done: int, _: Any) -> None:
        if done == 4:
            raise TrainingError("it diverges")

    monkeypatch.setattr(training_run, "take_snapshot", take)
    before_each_step(monkeypatch, fail)
    with pytest.raises(TrainingError, match="it diverges"):
        train(config, None, print)
    for thread in threading.enumerate():
        assert not thread.name.startswith(("checkpoint", "prefetch"))
    verify_folder(run.checkpoint(3))


def test_out_of_memory_is_one_line_that_says_what_to_lower_and_where_the_plan_is(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run")
    upscaled(config)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")

    before_each_step(monkeypatch, fail)
    with pytest.raises(OutOfMemory) as ended:
        train(config, None, print)
    told = str(ended.value)
    for part in (
        "micro_batch_size (now 4)",
        "activation_checkpointing",
        "Tried to allocate",
        "scale plan CONFIG",
    ):
        assert part in told
    assert told.isprintable()


@pytest.mark.parametrize("resume", ["auto", "step"])
def test_a_resume_reads_a_checkpoint_through_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    config = make_config("run", "train.max_hours=1e-9")
    newest, hashed = upscaled(config).checkpoint(1), list[Path]()
    with pytest.raises(Interrupted):
        go_on(config)

    def sha256(path: Path, *_moved: object) -> str:
        hashed.append(path)
        return file_sha256(path)

    monkeypatch.setattr(atomic, "file_sha256", sha256)
    with pytest.raises(Interrupted):
        train(config, "auto" if resume == "auto" else str(newest), print)
    read = [path.name for path in hashed if path.parent == newest]
    assert sorted([*read, "manifest.json"]) == sorted(file.name for file in newest.iterdir())


def test_a_run_in_which_another_process_trains_is_refused(make_config: MakeConfig) -> None:
    config = make_config("run", "train.max_steps=1")
    upscaled(config)
    # A lock of its own, as another process has.
    descriptor = os.open(config.output_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(RunFolderError, match="another process is at work here"):
        train(config, None, print)
    os.close(descriptor)
    train(config, None, print)
