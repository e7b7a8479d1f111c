"""A kill, a full disk or a failing one, anywhere: nothing whole is lost, and the same command ends as undisturbed."""

import errno
import itertools
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scale_cli.config.training import TrainConfig
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import (
    MANIFEST,
    partial_path,
    read_json,
    save_tensors,
    verify_folder,
)
from scale_cli.training import loop, training_run
from scale_cli.training.step import train_step
from tests.torture.faults import KILL, Fault
from tests.torture.tiny_run import (
    MAX_STEPS,
    SAVED_STEPS,
    Runs,
    assert_as_undisturbed,
    assert_same,
    beginning,
    undisturbed,
)
from tests.torture.verbs import PATIENCE_S, Ended, Hook, ended_group, run_verb, start_group

pytestmark = pytest.mark.long

Record = Callable[[str, object], None]
ERRORS = (KILL, errno.ENOSPC, errno.EIO, errno.EACCES)


@dataclass(frozen=True)
class SmallestFile:
    """No file may grow over a size: what Rust and C write fails too, with the system's own error."""

    num_bytes: int
    error: int = errno.EFBIG

    def __call__(self) -> None:
        """Put it into this process."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, self.num_bytes))


# Files that are smaller than the tensors that a verb writes, and larger than all else.
_SMALLER = {"train": "whole/final/trained.safetensors", "export": "base/model.safetensors"}
# In short, a verb is killed at so many calls, and meets one of the errors.
IN_SHORT = {
    "prepare": (1, errno.EIO),
    "train": (1, errno.ENOSPC),
    "evaluate": (1, errno.EACCES),
    "export": (1, 0),
}


def faults(
    runs: Runs, verb: str, calls: list[str], in_full: bool
) -> Iterator[Fault | SmallestFile]:
    """Yield what goes wrong in the run `failing`: at every call in full, and after half of every write."""
    root = runs.root / "failing"
    if verb in _SMALLER:
        yield SmallestFile((runs.root / _SMALLER[verb]).stat().st_size)
    if in_full:
        for error in ERRORS:
            for call, kind in enumerate(calls, start=1):
                for half in (False, True) if kind in ("write", "tensors") else (False,):
                    yield Fault(root, call, error=error, half=half)
        return
    num_kills, error = IN_SHORT[verb]
    for kill in range(num_kills):
        yield Fault(root, (kill + 1) * len(calls) // (num_kills + 1), half=True)
    if error:
        yield Fault(root, len(calls) // 2, error=error)


def place_of(folder: Path) -> Path:
    """Return where a folder belongs: it stands aside until another has come in its place."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".previous"))


def whole_folders(run: RunFolder) -> set[Path]:
    """Return the places of a run's folders, all of which have to be whole."""
    folders = {manifest.parent for manifest in run.root.rglob(MANIFEST)}
    aside = {
        folder
        for folder in folders
        if folder.name.endswith(".previous") and not place_of(folder).exists()
    }
    shown = {folder for folder in folders if "/." not in str(folder.relative_to(run.root.parent))}
    for folder in shown | aside:
        verify_folder(folder)
    places = shown | {place_of(folder) for folder in aside}
    return {place for place in places if place.parent != run.checkpoints}


def assert_told_clearly(ended: Ended, place: Path, error: int) -> None:
    assert ended.exit_code == 1, ended.printed
    assert "Traceback" not in ended.printed
    (line,) = re.findall(r"^error: .*", ended.printed, re.MULTILINE)
    assert str(place) in line and os.strerror(error) in line


@pytest.mark.parametrize("verb", IN_SHORT)
def test_what_goes_wrong_at_any_call_is_told_and_the_same_command_then_does_what_it_would_have_done(
    runs: Runs, in_full: bool, record_property: Record, verb: str
) -> None:
    calls = undisturbed(runs, verb)
    every_kind = "open write fsync rename mkdir unlink rmdir tensors"
    assert verb != "train" or {*every_kind.split()} <= {*calls}
    num_faults = num_met = 0
    for fault in faults(runs, verb, calls, in_full):
        run = beginning(runs, verb)
        before = whole_folders(run)
        ended = run_verb(*runs.arguments(verb, "failing"), hook=fault)
        after, num_faults = whole_folders(run), num_faults + 1
        if ended.exit_code != 0:  # or a call less was made, or rubbish could not be deleted
            num_met += 1
            if fault.error == KILL:
                assert ended.exit_code == -signal.SIGKILL, ended.printed
            else:
                assert_told_clearly(ended, run.root, fault.error)
                assert after >= before
            runs.do(verb, "failing")
        assert_as_undisturbed(runs, verb)
    assert num_met > num_faults / 2
    record_property(f"kills and errors in {verb}", f"{num_met}, at {len(calls)} calls")


def test_killed_at_random_instants_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    instants = random.Random(0)
    runs.upscaled("timed")
    started_s = time.monotonic()
    runs.do("train", "timed")
    usual_s = time.monotonic() - started_s
    kills = 0
    while kills < (200 if in_full else 1):
        runs.upscaled("killed")
        longest_s = usual_s
        while runs.start("killed").is_killed_after(instants.uniform(0, longest_s)):
            kills += 1
            longest_s += (
                usual_s / 10
            )  # or a machine that is busier than it was would never come to a checkpoint
        runs.finish_as("whole", "killed")
    record_property("SIGKILLs at random instants", kills)


def test_training_waits_for_checkpoints_less_than_a_fiftieth_of_its_time_at_the_default_cadence(
    runs: Runs,
) -> None:
    final = runs.folder("kept").final
    stall_s = read_json(final / "cost.json")["saving_s"] / len(SAVED_STEPS)
    step_s = read_json(final / "position.json")["elapsed_s"] / MAX_STEPS
    assert stall_s < 0.02 * TrainConfig(max_steps=1).save_every_steps * step_s


@dataclass(frozen=True)
class OfProcess:
    """What is put into one process of several."""

    rank: int
    hook: Hook

    def __call__(self) -> None:
        if os.environ["RANK"] == str(self.rank):
            self.hook()


def kill_beside_steps() -> None:
    """Kill this process in its second save, when it has taken two steps more."""
    steps_done, may_die = itertools.count(1), threading.Event()

    def step(*args: Any, **kwargs: Any) -> Any:
        taken = train_step(*args, **kwargs)
        if next(steps_done) == SAVED_STEPS[1] + 2:
            may_die.set()
        return taken

    def save(path: Path, *args: Any) -> None:
        if path.parents[1] == partial_path(path.parents[1].parent / f"step-{SAVED_STEPS[1]:08}"):
            may_die.wait(PATIENCE_S)
            os.kill(os.getpid(), signal.SIGKILL)
        save_tensors(path, *args)

    vars(loop)["train_step"] = step
    vars(training_run)["save_tensors"] = save


def train_together(
    runs: Runs, name: str, num_processes: int, hook: Hook | None = None
) -> list[int]:
    """Train in several processes; return their exit codes. Of those that were not killed one says why it ends."""
    ends = ended_group(
        start_group(*runs.arguments("train", name), num_processes=num_processes, hook=hook)
    )
    left = [ended for ended in ends if ended.exit_code == 1]
    assert all(ended.exit_code in (0, 1, -signal.SIGKILL) for ended in ends), ends
    assert sum("another process has ended" in ended.printed for ended in left) == bool(left), ends
    return [ended.exit_code for ended in ends]


def test_one_of_several_processes_is_killed_beside_steps_or_where_it_writes_and_the_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    kills = 0
    layouts = ((2, "none"), (2, "expansion"), (2, "all"), (4, "all")) if in_full else ((2, "all"),)
    for num_processes, sharding in layouts:
        several = Runs(runs.root, (f"train.sharding={sharding}",))
        for rank in range(num_processes) if in_full else (1,):
            whole, counted = several.upscaled("whole-of-several"), several.root / "calls.jsonl"
            count = OfProcess(rank, Fault(whole.root, 0, counted=counted))
            assert not any(train_together(several, "whole-of-several", num_processes, count))
            num_calls = len(counted.read_text().splitlines())
            killed = several.folder("killed")
            calls = range(1, num_calls, 1 + num_calls // 12) if in_full else (num_calls // 2,)
            hooks: list[Hook] = []
            if num_processes == 2:
                hooks += [Fault(killed.root, call, half=True) for call in calls]
            if sharding != "none":  # else one process writes all
                hooks.append(kill_beside_steps)
            for hook in hooks:
                several.upscaled("killed")
                codes = train_together(several, "killed", num_processes, OfProcess(rank, hook))
                if hook is kill_beside_steps:
                    assert codes[rank] == -signal.SIGKILL
                    written = [folder.name for folder in killed.checkpoints.glob("step-*")]
                    assert written == [killed.checkpoint(SAVED_STEPS[0]).name]
                kills += any(codes)
                assert not any(train_together(several, "killed", num_processes))
                assert_same(killed, whole)
    assert kills > 1
    record_property("kills of one of several processes", kills)
