"""A damaged file in any folder: always found, never used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import verify_folder
from scale_cli.storage.records import RunFolder
from scale_cli.training.checkpoint import newest_whole_checkpoint
from tests.torture.tiny_run import MAX_STEPS, SAVED_STEPS, Runs, assert_same
from tests.torture.verbs import run_verb

Record = Callable[[str, object], None]
Damage = Callable[[Path], None]


def cut(keep: Callable[[int], int]) -> Damage:
    return lambda file: os.truncate(file, keep(file.stat().st_size))


def flip(place: Callable[[int], int]) -> Damage:
    def flip_bit(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place(len(content))] ^= 1 << (place(len(content)) % 8)
        file.write_bytes(content)

    return flip_bit


DAMAGES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": cut(lambda _: 0),
    "cut in half": cut(lambda size: size // 2),
    "last byte missing": cut(lambda size: size - 1),
    "first byte flipped": flip(lambda _: 0),
    "middle byte flipped": flip(lambda size: size // 2),
    "last byte flipped": flip(lambda size: size - 1),
}


def files_of(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_any_damage_of_the_newest_checkpoint_is_found_and_the_one_before_it_taken(
    runs: Runs, record_property: Record
) -> None:
    shutil.copytree(runs.folder("whole").root, runs.root / "damaged")
    run = runs.folder("damaged")
    newest, before = (run.checkpoint(step) for step in (SAVED_STEPS[-1], SAVED_STEPS[-2]))
    assert newest_whole_checkpoint(run) == (newest, [])
    found = 0
    for file in files_of(newest):
        for damage in DAMAGES.values():
            content = (newest / file).read_bytes()
            damage(newest / file)
            start, (skipped,) = newest_whole_checkpoint(run)
            assert start == before
            assert newest.name in skipped
            assert (
                str(newest / "manifest.json") in skipped if file == "manifest.json" else str(newest / file) in skipped
            )
            (newest / file).write_bytes(content)
            found += 1
    assert newest_whole_checkpoint(run) == (newest, [])
    assert found == 7 * len(files_of(newest)) and found > 60
    record_property("damages of the newest checkpoint found", f"{found} of {found}")


def test_resumed_over_a_damaged_checkpoint_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool, record_property: Record
) -> None:
    """The damaged one is in the middle of a run that goes on, and is replaced when its step comes again."""
    name = runs.folder("kept").checkpoint(6).name
    ways = [(file, damage) for file in files_of(runs.folder("kept").checkpoint(6)) for damage in DAMAGES]
    if not in_full:
        ways = [("optimiser.safetensors", "middle byte flipped"), ("manifest.json", "missing")]
    for file, damage in ways:
        run = runs.midway("kept", "damaged")
        DAMAGES[damage](run.checkpoint(6) / file)
        printed = runs.do("train", "damaged").printed
        assert f"warning: checkpoint {name} skipped" in printed
        assert f"resuming       {run.checkpoint(3)}" in printed
        assert_same(run, runs.folder("whole"))
        shutil.rmtree(run.root)
    record_property("resumes over a damaged checkpoint", f"{len(ways)}, none diverged")


def test_the_newest_good_checkpoint_outlives_damaged_ones_of_later_steps(runs: Runs) -> None:
    run = runs.midway("kept", "damaged")
    DAMAGES["empty"](run.checkpoint(6) / "optimiser.safetensors")
    for step in (4, 5):
        ended = run_verb(*runs.arguments("train", "damaged"), "train.max_hours=1e-9", "train.keep_checkpoints=1")
        assert ended.exit_code == 0, ended.printed
        assert newest_whole_checkpoint(run)[0] == run.checkpoint(step)
    runs.finish_as("whole", "damaged")


def assert_refused(runs: Runs, verb: str, folder: Path) -> None:
    ended = run_verb(*runs.arguments(verb, "damaged"))
    assert ended.exit_code in (1, 2), ended.printed
    assert "Traceback" not in ended.printed
    (line,) = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
    assert str(folder) in line


@pytest.mark.parametrize(("folder", "verbs"), [("final", ("train", "evaluate", "export")), ("upscaled", ("train",))])
def test_a_damaged_final_or_start_is_refused_by_every_verb(
    runs: Runs, in_full: bool, record_property: Record, folder: str, verbs: tuple[str, ...]
) -> None:
    run = RunFolder(Path(shutil.copytree(runs.folder("whole").root, runs.root / "damaged")))
    if folder == "upscaled":
        shutil.rmtree(run.final)
    there = run.root / folder
    refused = 0
    for number, file in enumerate(files_of(there)):
        for damage in DAMAGES:
            content = (there / file).read_bytes()
            DAMAGES[damage](there / file)
            with pytest.raises(StorageError):
                verify_folder(there)
            if in_full or (number == 3 and damage == "middle byte flipped"):
                for verb in verbs:
                    assert_refused(runs, verb, there)
                    refused += 1
            (there / file).write_bytes(content)
    assert refused
    record_property(f"verbs that refused a damaged {folder}/", refused)


def test_a_folder_that_someone_put_beside_the_checkpoints_is_neither_used_nor_deleted(runs: Runs) -> None:
    run = runs.midway("kept", "mine")
    for name in ("step-backup", "step-00000099.old", "notes"):
        shutil.copytree(run.checkpoint(3), run.checkpoints / name)
    runs.do("train", "mine")
    assert {folder.name for folder in run.checkpoints.iterdir()} >= {"step-backup", "step-00000099.old", "notes"}
    assert run.checkpoint(MAX_STEPS).is_dir()
    assert not run.checkpoint(3).exists()
