"""SIGKILL at any instant: every run resumes, and ends as one that nobody killed, bit for bit."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable

import pytest

from scale_cli.storage.records import RunFolder
from tests.torture.faults import Fault
from tests.torture.tiny_run import Runs, assert_as_undisturbed, assert_same, beginning, undisturbed
from tests.torture.verbs import ended_group, run_verb

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


def resumed_by_two(runs: Runs, name: str) -> None:
    for ended in ended_group(runs.start_two(name)):
        assert ended.exit_code == 0, ended.printed


def test_of_two_processes_one_or_both_are_killed_and_the_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    instants = random.Random(2)
    for sharding in ("none", "expansion") if in_full else ("none",):
        two = Runs(runs.root, runs.inputs, (f"train.sharding={sharding}",))
        whole = two.upscaled(f"whole-{sharding}")
        started_s = time.monotonic()
        resumed_by_two(two, whole.root.name)
        usual_s = time.monotonic() - started_s
        kills = 0
        while kills < (20 if in_full else 1):
            run = two.upscaled("killed")
            for _ in range(4 if in_full else 1):
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
    ends = ended_group(verbs)
    for ended in ends:
        assert ended.exit_code in (0, 1, -9), ended.printed
        assert ended.exit_code != 1 or "another process is gone" in ended.printed, ended.printed
    return any(ended.exit_code for ended in ends)
