"""What a verb does where nothing is wrong, and whether a disturbed one came to the same in the end."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from scale_cli.storage.atomic import MANIFEST
from scale_cli.storage.layout import RunFolder
from tests.torture.faults import Fault
from tests.torture.tiny_run import Runs, assert_same
from tests.torture.verbs import run_verb


def beginning(runs: Runs, verb: str) -> RunFolder:
    """Return a run in which a verb is the next one."""
    if verb == "train":
        return runs.midway("kept", "failing")
    if verb == "prepare":
        run = runs.upscaled("failing")
        shutil.rmtree(run.tokens)  # which upscale fills
        return run
    return RunFolder(Path(shutil.copytree(runs.root / "whole", runs.root / "failing")))


def written_by(verb: str, run: RunFolder) -> Path:
    return {"prepare": run.tokens, "evaluate": run.evaluation, "export": run.root / "export"}[verb]


def hashes(folder: Path) -> dict[str, str]:
    """Return what has to be the same in two results: all but the config, which names its folder, and its hash.

    How far a tokenisation had come may stay written down after its end, where the end was disturbed.
    """
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (MANIFEST, "scale.yaml") and file.suffixes != [".progress", ".json"]
    }


@dataclass(frozen=True)
class Undisturbed:
    """What a verb does when nothing is wrong.

    Args:
        written: hashes of what it leaves; of `train`, the whole run tells.
        num_calls: how many calls of it change the disk.
    """

    written: dict[str, str]
    num_calls: int


def undisturbed(runs: Runs, verb: str) -> Undisturbed:
    run, counted = beginning(runs, verb), runs.root / "calls.jsonl"
    ended = run_verb(*runs.arguments(verb, "failing"), hook=Fault(run.root, 0, counted=counted))
    assert ended.exit_code == 0, ended.printed
    written = {} if verb == "train" else hashes(written_by(verb, run))
    shutil.rmtree(run.root)
    return Undisturbed(written, len(counted.read_text(encoding="utf-8").splitlines()))


def assert_as_undisturbed(runs: Runs, verb: str, expected: Undisturbed) -> None:
    run = runs.folder("failing")
    if verb == "train":
        assert_same(run, runs.folder("whole"))
    else:
        assert expected.written and hashes(written_by(verb, run)) == expected.written
