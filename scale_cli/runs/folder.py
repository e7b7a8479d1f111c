"""The folders and files of one run: their places, and whether results can be written there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

from scale_cli.config.sources import TOKENS
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.atomic import MANIFEST, described_files, json_sha256, read_json

TRAINED = "trained.safetensors"
_STEP = "step-"


class RunFolder:
    """The folders and files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.upscaled = root / "upscaled"  # the model to train, as `scale upscale` prepared it
        self.checkpoints = root / "checkpoints"  # from which `scale train` resumes
        self.final = root / "final"  # the trained model
        self.tensorboard = root / "tensorboard"  # TensorBoard's files
        self.tokens = root / TOKENS  # tokenised corpora, unless corpus.cache_dir says otherwise
        self.evaluation = root / "evaluation"  # the forgetting report
        self.evaluations = root / "evaluations"  # of checkpoints, each by its name
        self.exports = root / "export"  # a folder per format
        # a line for every logged step and periodic evaluation
        self.metrics = root / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{_STEP}{step:08d}"

    def export(self, export_format: str, dtype: str | None = None) -> Path:
        """Return the folder of an export; `dtype` as the config asks for it, None for the base's
        own.
        """
        return self.exports / (export_format if dtype is None else f"{export_format}-{dtype}")

    @property
    def saved(self) -> list[Path]:
        """The checkpoints, oldest first; folders with any other name are ignored."""
        found = self.checkpoints.glob(f"{_STEP}*")
        named = [folder for folder in found if folder.name.removeprefix(_STEP).isdecimal()]
        return sorted(named, key=step_of)

    @property
    def newest_first(self) -> list[Path]:
        """The method folders that may be there, the newest first."""
        return [self.final, *reversed(self.saved), self.upscaled]

    @property
    def config(self) -> Path:
        """The config file of the run's newest folder."""
        for folder in (self.root, *self.newest_first):
            if (folder / "scale.yaml").is_file():
                return folder / "scale.yaml"
        raise RunFolderError(
            f"{self.root}: is a folder, but not that of a run; give a config (YAML), or the folder of a run"
        )

    def check_is_whole(self) -> None:
        """Raise RunFolderError if this is `final/` or an export, in which a run would make another one."""
        if not (self.root / MANIFEST).is_file():
            return
        above = self.root.absolute().parents[:2]
        runs = [folder for folder in above if (folder / self.upscaled.name).is_dir()]
        whole = f"; give the run, {runs[0]}" if runs else ""
        raise RunFolderError(f"{self.root}: is a part of a run, and no run itself{whole}")

    def check_upscaled(self) -> None:
        """Raise RunFolderError if `scale upscale` has not written `upscaled/`."""
        if not self.upscaled.is_dir():
            raise RunFolderError(f"{self.upscaled}: does not exist; run `scale upscale` first")

    def check_finished(self) -> None:
        """Raise RunFolderError if training has not written `final/`."""
        if not self.final.is_dir():
            resumed = " --resume auto" if self.saved else ""
            raise RunFolderError(f"{self.final}: does not exist; run `scale train{resumed}` first")

    def check(self) -> None:
        """Raise RunFolderError, before any work, if results cannot be written here or would land
        elsewhere.
        """
        check_folder("output_dir", self.root)
        root = os.path.realpath(self.root)
        places = [path for path in vars(self).values() if path != self.root]
        for place in places:
            # Half-written folders included, which have names of their own.
            for path in (place, *place.parent.glob(f".{place.name}.*")):
                for link in (path, *_below(path)):
                    if not link.is_symlink():
                        continue
                    if not Path(os.path.realpath(link)).is_relative_to(root):
                        raise RunFolderError(
                            f"{link}: points outside output_dir, to {link.readlink()}; nothing is written there, so "
                            "remove it"
                        )
            if os.path.lexists(place) and not place.is_dir() and place != self.metrics:
                raise RunFolderError(
                    f"{place}: is not a folder, but a folder must be written there; move it away"
                )


def _below(path: Path) -> Iterator[Path]:
    """Yield what a folder holds at any depth; what training renames or removes meanwhile is left out."""
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))


def of_checkpoint(path: Path) -> RunFolder | None:
    """Return the run that a checkpoint's folder belongs to; None for any other path."""
    run = RunFolder(path.resolve().parent.parent)
    is_one = path.is_dir() and path.resolve().parent == run.checkpoints
    return run if is_one else None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is no folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_folder(key: str, folder: Path) -> None:
    """Raise RunFolderError unless a folder exists or can be made, and can be written to."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise RunFolderError(f"{key} {folder}: {there} is not a folder")
    try:
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError
        if not folder.exists():  # root passes os.access, but some file systems hold no folders
            # Under a name of its own: other processes check the same folder.
            Path(mkdtemp(dir=there)).rmdir()
    except OSError:
        raise RunFolderError(f"{key} {folder}: {there} cannot be written to") from None


def check_replaceable(output: Path, kind: str) -> None:
    """Raise RunFolderError unless a folder is empty, or holds a result of this kind and nothing
    else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    there = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    try:
        ours = {*described_files(output), MANIFEST}
        replaceable = there <= ours and read_json(output / "report.json")["kind"] == kind
    except (StorageError, KeyError, TypeError):
        replaceable = False
    if not replaceable:
        raise RunFolderError(
            f"--output {output}: holds something other than a {kind}; choose a new folder"
        )


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(_STEP))


def trained_sha256(folder: Path) -> str:
    """Return the hash of the trained tensors; in a sharded checkpoint, that of its files' hashes."""
    hashes = {name: str(of["sha256"]) for name, of in described_files(folder).items()}
    if TRAINED in hashes:
        return hashes[TRAINED]
    tensors = {name: of for name, of in hashes.items() if name.endswith(".safetensors")}
    if not tensors:
        raise StorageError(f"{folder / MANIFEST}: does not name {TRAINED}")
    return json_sha256(tensors)
