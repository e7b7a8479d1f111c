"""Where a run's results land, under one output_dir, and what may be replaced there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.atomic import MANIFEST, described_files, read_json


class RunFolder:
    """The folders and files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.upscaled = root / "upscaled"  # the expansion as `scale upscale` made it
        self.checkpoints = root / "checkpoints"  # where `scale train` saves what it needs to go on
        self.final = root / "final"  # the trained expansion
        self.tensorboard = root / "tensorboard"  # TensorBoard's files
        self.tokens = root / "tokens"  # tokenised corpora, unless corpus.cache_dir says otherwise
        self.evaluation = root / "evaluation"  # the forgetting report
        self.exports = root / "export"  # a folder for each format
        self.profile = root / "profile"  # traces of `train.profile_steps`
        self.metrics = root / "metrics.jsonl"  # an object a line, for every logged step and periodic evaluation

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def export(self, export_format: str, dtype: str = "float32") -> Path:
        return self.exports / (export_format if dtype == "float32" else f"{export_format}-{dtype}")

    @property
    def config(self) -> Path:
        """The config that the run was made with, as far as it has come."""
        newest_first = sorted(self.checkpoints.glob("step-*"), reverse=True)
        for folder in (self.root, self.final, *newest_first, self.upscaled):
            if (folder / "scale.yaml").is_file():
                return folder / "scale.yaml"
        raise RunFolderError(f"{self.root}: is a folder, and not one of a run: give a config (YAML), or a run's folder")

    def check(self) -> None:
        """Find out before any work whether results can land here, and only here."""
        check_folder("output_dir", self.root)
        root = os.path.realpath(self.root)
        places = [path for path in vars(self).values() if path != self.root]
        for link in (link for place in places for link in _links(place)):
            if not Path(os.path.realpath(link)).is_relative_to(root):
                raise RunFolderError(f"{link}: leads out of output_dir, to {link.readlink()}; nothing is written there")
        for place in places:
            if os.path.lexists(place) and not place.is_dir() and place != self.metrics:
                raise RunFolderError(f"{place}: is not a folder, and one is to be written there; move it away")


def _links(place: Path) -> Iterator[Path]:
    """Yield the symbolic links where something of ours may be written, half-written folders included."""
    for path in (place, *place.parent.glob(f".{place.name}.*")):
        yield from (found for found in (path, *path.rglob("*")) if found.is_symlink())


def check_folder(key: str, folder: Path) -> None:
    """Find out whether a folder is there, or can be made, and may be written to."""
    missing, there = None, folder.absolute()
    while not os.path.lexists(there):
        missing, there = there, there.parent
    if not there.is_dir():
        raise RunFolderError(f"{key} {folder}: {there} is not a folder")
    try:
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError
        if missing is not None:  # root may write anywhere, but for file systems that hold no folders of anybody's
            missing.mkdir()
            with suppress(OSError):  # another process is at work in it
                missing.rmdir()
    except FileExistsError:  # another process has just made it
        return
    except OSError:
        raise RunFolderError(f"{key} {folder}: {there} cannot be written to") from None


def check_replaceable(output: Path, kind: str) -> None:
    """Refuse a folder that holds anything but a result of one kind, whole and with nothing added."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    there = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    try:
        ours = {*described_files(output), MANIFEST}
        replaceable = there <= ours and read_json(output / "report.json")["kind"] == kind
    except (StorageError, KeyError, TypeError):
        replaceable = False
    if not replaceable:
        raise RunFolderError(f"--output {output}: holds something other than a {kind}; choose a new folder")
