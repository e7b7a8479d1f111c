"""Full disks, failing ones, folders that may not be written: one clear line, exit 1, and nothing lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from scale_cli.storage.atomic import MANIFEST, verify_folder
from scale_cli.storage.records import RunFolder
from tests.torture.faults import Fault
from tests.torture.tiny_run import Runs, Undisturbed, assert_as_undisturbed, beginning, hashes, undisturbed
from tests.torture.verbs import Ended, run_verb

Record = Callable[[str, object], None]
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}


def assert_previous_state_is_whole(run: RunFolder) -> None:
    for manifest in run.root.rglob(MANIFEST):
        if not any(part.startswith(".") for part in manifest.relative_to(run.root).parts):
            verify_folder(manifest.parent)


def assert_told_clearly(ended: Ended, place: str, reason: str) -> None:
    assert ended.exit_code == 1, ended.printed
    assert "Traceback" not in ended.printed
    (line,) = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
    assert place in line
    assert reason in line


# In short, each verb meets the first of its errors, once.
MET = {
    "prepare": ("EIO", "ENOSPC", "EACCES"),
    "train": ("ENOSPC", "EIO", "EACCES"),
    "evaluate": ("EACCES", "ENOSPC", "EIO"),
    "export": ("ENOSPC", "EIO", "EACCES"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "reason" in metafunc.fixturenames:
        num_met = 3 if metafunc.config.getoption("--torture") else 1
        met = [(verb, reason) for verb, reasons in MET.items() for reason in reasons[:num_met]]
        metafunc.parametrize(("verb", "reason"), met)


def test_an_error_at_any_call_is_told_and_the_same_command_then_does_what_it_would_have_done(
    runs: Runs, in_full: bool, record_property: Record, verb: str, reason: str
) -> None:
    expected = undisturbed(runs, verb)
    failed, num_calls = 0, len(expected.calls)
    for call in range(1, num_calls + 1) if in_full else (1 + num_calls // 2,):
        run = beginning(runs, verb)
        fault = Fault(run.root, call, error=ERRORS[reason], half=bool(call % 2))
        ended = run_verb(*runs.arguments(verb, "failing"), hook=fault)
        assert_previous_state_is_whole(run)
        if ended.exit_code != 0:  # else it was the deletion of what is rubbish anyway
            assert_told_clearly(ended, str(run.root), os.strerror(ERRORS[reason]))
            failed += 1
            runs.do(verb, "failing")
        assert_as_undisturbed(runs, verb, expected)
    record_property(f"{reason} in {verb}", f"{failed} told, of {num_calls} calls")


@dataclass(frozen=True)
class SmallestFile:
    """No file may grow over a size: what Rust and C write fails too, with the system's own error."""

    num_bytes: int

    def __call__(self) -> None:
        """Put it into this process."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, self.num_bytes))


@pytest.mark.parametrize(
    ("verb", "largest", "named"),
    [
        ("prepare", None, "/tmp"),
        ("train", "checkpoints/step-00000012/optimiser.safetensors", "optimiser.safetensors"),
        ("export", "export/llama/model.safetensors", "export/llama"),
    ],
)
def test_a_file_that_the_system_itself_refuses_to_write_on(
    runs: Runs, verb: str, largest: str | None, named: str
) -> None:
    """The tensors, written by Rust; and, where nothing can be written at all, the tokenizer's copy that is hashed."""
    expected = Undisturbed({}, []) if verb == "train" else undisturbed(runs, verb)
    run = beginning(runs, verb)
    num_bytes = 300
    if largest is not None:
        made = runs.folder("whole").root / largest
        if not made.exists():
            runs.do(verb, "failing")
            made = run.root / largest
        num_bytes = made.stat().st_size - 1
    before = hashes(run.root)
    ended = run_verb(*runs.arguments(verb, "failing"), hook=SmallestFile(num_bytes))
    assert_told_clearly(ended, named, "File too large")
    assert_previous_state_is_whole(run)
    assert before.items() - hashes(run.root).items() <= {("metrics.jsonl", before.get("metrics.jsonl"))}
    runs.do(verb, "failing")
    assert_as_undisturbed(runs, verb, expected)
