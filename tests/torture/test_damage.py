"""A damaged file in any folder: always found, never used."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import verify_folder
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


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    """Damage every file of a folder in every way, one after another; yield which it is, and mend it."""
    for file in files_of(folder):
        content = file.read_bytes()
        for name, damage in DAMAGES.items():
            damage(file)
            yield file, name
            file.write_bytes(content)


def test_any_damage_of_the_newest_checkpoint_is_found_and_the_one_before_it_taken(
    runs: Runs,
) -> None:
    run = runs.copy("whole", "damaged")
    newest, before = (run.checkpoint(step) for step in (SAVED_STEPS[-1], SAVED_STEPS[-2]))
    for file, _ in damaged(newest):
        start, (skipped,) = newest_whole_checkpoint(run)
        assert start == before
        assert newest.name in skipped and str(file) in skipped
    assert newest_whole_checkpoint(run) == (newest, [])


def test_resumed_over_a_damaged_checkpoint_a_run_ends_as_the_whole_one(
    runs: Runs, in_full: bool
) -> None:
    """The damaged one is in the middle of a run that goes on, and is replaced when its step comes again."""
    cases = [("optimiser.safetensors", "middle byte flipped"), ("scale.yaml", "empty")]
    if in_full:
        names = [file.name for file in files_of(runs.folder("kept").checkpoint(6))]
        cases = [(name, damage) for name in names for damage in DAMAGES]
    for name, damage in cases:
        run = runs.midway("damaged")
        DAMAGES[damage](run.checkpoint(6) / name)
        printed = runs.do("train", "damaged").printed
        assert f"warning: checkpoint {run.checkpoint(6).name} skipped" in printed
        assert f"resuming       {run.checkpoint(3)}" in printed
        assert_same(run, runs.folder("whole"))


def test_the_newest_good_checkpoint_outlives_damaged_ones_of_later_steps(runs: Runs) -> None:
    run = runs.midway("damaged")
    DAMAGES["empty"](run.checkpoint(6) / "optimiser.safetensors")
    for step in (4, 5):
        stops = ("train.max_hours=1e-9", "train.keep_checkpoints=1")
        ended = run_verb(*runs.arguments("train", "damaged"), *stops)
        assert f"stopped by train.max_hours after step {step};" in ended.printed
        assert newest_whole_checkpoint(run)[0] == run.checkpoint(step)
    runs.finish_as("whole", "damaged")


@pytest.mark.parametrize(
    ("name", "verbs"), [("final", ("train", "evaluate", "export")), ("upscaled", ("train",))]
)
def test_a_damaged_final_or_start_is_refused_by_every_verb(
    runs: Runs, in_full: bool, record_property: Record, name: str, verbs: tuple[str, ...]
) -> None:
    run = runs.copy("whole", "damaged")
    if name == "upscaled":
        shutil.rmtree(run.final)
    folder, refused = run.root / name, 0
    for file, damage in damaged(folder):
        with pytest.raises(StorageError):
            verify_folder(folder)
        if in_full or (file.name == "trained.safetensors" and damage == "middle byte flipped"):
            for verb in verbs:
                ended = run_verb(*runs.arguments(verb, "damaged"))
                assert ended.exit_code in (1, 2), ended.printed
                assert "Traceback" not in ended.printed
                (line,) = re.findall(r"^error: .*", ended.printed, re.MULTILINE)
                assert str(folder) in line
                refused += 1
    assert refused >= len(verbs)
    record_property(f"verbs that refused a damaged {name}/", refused)


def test_a_folder_that_someone_put_beside_the_checkpoints_is_neither_used_nor_deleted(
    runs: Runs,
) -> None:
    run, names = runs.midway("mine"), {"step-backup", "step-00000099.old", "notes"}
    for name in names:
        shutil.copytree(run.checkpoint(3), run.checkpoints / name)
    runs.do("train", "mine")
    assert {folder.name for folder in run.checkpoints.iterdir()} >= names
    assert run.checkpoint(MAX_STEPS).is_dir()
    assert not run.checkpoint(3).exists()
