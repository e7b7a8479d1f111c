"""SIGKILL at any instant: every run resumes, and ends as one that nobody killed, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scale_cli.storage.atomic import partial_folder, save_tensors
from scale_cli.storage.records import RunFolder
from scale_cli.training import loop
from scale_cli.training import run as training_run
from scale_cli.training.step import train_step
from tests.torture.faults import Fault
from tests.torture.tiny_run import SAVED_STEPS, Runs, assert_as_undisturbed, assert_same, beginning, undisturbed
from tests.torture.verbs import PATIENCE_S, Ended, Hook, ended_group, run_verb, start_group

pytestmark = pytest.mark.long

Record = Callable[[str, object], None]


def is_in_a_save(run: RunFolder) -> bool:
    """Return whether a killed process was writing or deleting a folder."""
    hidden = [*run.checkpoints.glob(".*"), *run.root.glob(".*")]
    return any(path.suffix in (".partial", ".previous") for path in hidden)


def test_killed_at_random_instants_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    instants = random.Random(0)
    runs.upscaled("timed")
    started_s = time.monotonic()
    runs.do("train", "timed")
    usual_s = time.monotonic() - started_s
    kills = kills_in_saves = num_runs = 0
    while kills < (200 if in_full else 3):
        run, num_runs, longest_s = runs.upscaled("killed"), num_runs + 1, usual_s
        while runs.start("killed").is_killed_after(instants.uniform(0, longest_s)):
            kills += 1
            kills_in_saves += is_in_a_save(run)
            longest_s += usual_s / 10  # or a machine that is busier than it was would never come to a checkpoint
        runs.finish_as("whole", "killed")
    record_property("SIGKILLs at random instants", f"{kills}, {kills_in_saves} of them in a save, {num_runs} runs")


def kill_at(runs: Runs, call: int, *, half: bool = False) -> bool:
    """Kill a run at a boundary; return whether it came so far."""
    ended = run_verb(*runs.arguments("train", "killed"), hook=Fault(runs.root / "killed", call, half=half))
    assert ended.exit_code in (0, -9), ended.printed
    return ended.exit_code == -9


def test_killed_at_every_write_fsync_and_rename_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    """Two saves, one deletion, the log and `final/`; what is killed after one call is killed before the next."""
    kinds = undisturbed(runs, "train").calls
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "tensors"} <= set(kinds)
    # Two threads take turns, so a call more or less may come before; the last ones are past the end then.
    boundaries = range(1, len(kinds) + 3) if in_full else range(30, len(kinds), len(kinds) // 3)
    kills = 0
    for call in boundaries:
        halves = (False, True) if call <= len(kinds) and kinds[call - 1] in ("write", "tensors") else (False,)
        for half in halves:
            runs.midway("kept", "killed")
            kills += kill_at(runs, call, half=half)
            runs.finish_as("whole", "killed")
    assert kills >= len(boundaries) - 6
    record_property("kills at boundaries of what is written", f"{kills}, of {len(kinds)} boundaries")


@pytest.mark.parametrize("verb", ["prepare", "evaluate", "export"])
def test_killed_at_every_write_fsync_and_rename_another_verb_does_what_it_would_have_done(
    runs: Runs, in_full: bool, record_property: Record, verb: str
) -> None:
    expected = undisturbed(runs, verb)
    num_calls = len(expected.calls)
    for call in range(1, num_calls + 1) if in_full else (num_calls - 3,):
        killed = run_verb(*runs.arguments(verb, "failing"), hook=Fault(beginning(runs, verb).root, call))
        assert killed.exit_code == -9, killed.printed
        runs.do(verb, "failing")
        assert_as_undisturbed(runs, verb, expected)
    record_property(f"kills at boundaries of {verb}", num_calls)


def test_killed_at_two_boundaries_in_a_row_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    num_calls, places = len(undisturbed(runs, "train").calls), random.Random(1)
    kills = 0
    for _ in range(60 if in_full else 1):
        runs.midway("kept", "killed")
        for _ in range(2):
            kills += kill_at(runs, places.randrange(1, num_calls))
        runs.finish_as("whole", "killed")
    record_property("kills at two boundaries in a row", kills)


@dataclass(frozen=True)
class InProcess:
    """What is put into one process of several."""

    rank: int
    hook: Hook

    def __call__(self) -> None:
        if os.environ["RANK"] == str(self.rank):
            self.hook()


@dataclass(frozen=True)
class KillBesideSteps:
    """Kill this process in its second save, when it has taken two steps more."""

    def __call__(self) -> None:
        steps_done, may_die = itertools.count(1), threading.Event()

        def step(*args: Any, **kwargs: Any) -> Any:
            taken = train_step(*args, **kwargs)
            if next(steps_done) == SAVED_STEPS[1] + 2:
                may_die.set()
            return taken

        def save(path: Path, *args: Any) -> None:
            if path.parents[1] == partial_folder(path.parents[1].parent / f"step-{SAVED_STEPS[1]:08}"):
                may_die.wait(PATIENCE_S)
                os.kill(os.getpid(), signal.SIGKILL)
            save_tensors(path, *args)

        vars(loop)["train_step"] = step
        vars(training_run)["save_tensors"] = save


def by_two(runs: Runs, name: str, hook: Hook | None = None) -> list[Ended]:
    return ended_group(start_group(*runs.arguments("train", name), num_processes=2, hook=hook))


def resumed_by_two(runs: Runs, name: str) -> None:
    for ended in by_two(runs, name):
        assert ended.exit_code == 0, ended.printed


def run_of_two(runs: Runs, sharding: str) -> tuple[Runs, RunFolder]:
    """Return runs of a sharding, and one of them that two processes have trained."""
    two = Runs(runs.root, runs.inputs, (f"train.sharding={sharding}",))
    whole = two.upscaled(f"whole-{sharding}")
    resumed_by_two(two, whole.root.name)
    return two, whole


def check_ends(ends: list[Ended]) -> bool:
    """Check that who was not killed was told why it ends; return whether any was killed."""
    for ended in ends:
        assert ended.exit_code in (0, 1, -9), ended.printed
        assert ended.exit_code != 1 or "another process is gone" in ended.printed, ended.printed
    return any(ended.exit_code for ended in ends)


def test_killed_while_both_processes_step_beside_their_sharded_save_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool
) -> None:
    for sharding in ("expansion", "all") if in_full else ("all",):
        two, whole = run_of_two(runs, sharding)
        for rank in (0, 1) if in_full else (1,):
            run = two.upscaled("killed")
            ends = by_two(two, "killed", InProcess(rank, KillBesideSteps()))
            assert check_ends(ends) and ends[rank].exit_code == -9, ends
            assert [folder.name for folder in run.checkpoints.glob("step-*")] == [run.checkpoint(SAVED_STEPS[0]).name]
            resumed_by_two(two, "killed")
            assert_same(run, whole)
            shutil.rmtree(run.root)


def test_of_two_processes_one_or_both_are_killed_anywhere_and_the_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    """At random instants, and of each process at boundaries of what it writes."""
    instants = random.Random(2)
    for sharding in ("none", "expansion", "all") if in_full else ():
        two, whole = run_of_two(runs, sharding)
        started_s, counted = time.monotonic(), two.root / "calls.jsonl"
        kills = 0
        for rank in (0, 1):
            run = two.upscaled("killed")
            by_two(two, "killed", InProcess(rank, Fault(run.root, 0, counted=counted)))
            usual_s = (time.monotonic() - started_s) / (rank + 1)
            num_calls = len(counted.read_text(encoding="utf-8").splitlines())
            shutil.rmtree(run.root)
            for call in range(1, num_calls, 1 + num_calls // 12):
                run = two.upscaled("killed")
                kills += check_ends(by_two(two, "killed", InProcess(rank, Fault(run.root, call))))
                resumed_by_two(two, "killed")
                assert_same(run, whole)
                shutil.rmtree(run.root)
        for _ in range(5):
            run = two.upscaled("killed")
            for _ in range(4):
                kills += kill_of_two(two, instants.uniform(0.4, 0.9) * usual_s, instants)
            resumed_by_two(two, "killed")
            assert_same(run, whole)
            shutil.rmtree(run.root)
        record_property(f"kills of one or both of two processes, sharding {sharding}", kills)


def kill_of_two(two: Runs, delay_s: float, instants: random.Random) -> bool:
    """Kill one or both processes after a while; where one is left, it must not wait for ever."""
    verbs = two.start_two("killed")
    time.sleep(delay_s)
    for verb in instants.choice([verbs, verbs[:1], verbs[1:]]):
        verb.kill()
    return check_ends(ended_group(verbs))
