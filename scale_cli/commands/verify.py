"""The verb `scale verify`: check offline that a folder is as scale wrote it.

The contents of the folder decide which checks are made. A check that needs a base or a trained
model that is not at hand is not made; that is no pass, so the verb ends with exit code 3 then too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from scale_cli.commands.export import check_written_export
from scale_cli.config.load import load_config
from scale_cli.errors import (
    BaseModelError,
    ChangedBaseError,
    CheckFailed,
    PreservationError,
    RunFolderError,
    ScaleError,
)
from scale_cli.export.records import ExportRecord
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import MethodFolder
from scale_cli.storage.atomic import MANIFEST, described_files, verify_folder
from scale_cli.terminal import log, print_json
from scale_cli.upscale.base import load_base
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.given_model import (
    GivenModel,
    given_model,
    has_tokenizer,
    load_given,
    other_base,
    tokenizer_of_given,
)
from scale_cli.upscale.preservation import own_logits, sample_ids


@dataclass
class FolderCheck:
    """The results of the checks of one folder."""

    folder: Path
    held: list[str] = field(default_factory=list)  # what was checked and found good
    failed: list[str] = field(default_factory=list)  # what was found wrong
    unchecked: list[str] = field(default_factory=list)  # what could not be checked here, and why


def verify(path: Path, base: str | None = None) -> None:
    """Log what is found, folder by folder as it is found.

    With `base`, `path` is a model that others trained from it; an adapter may name its base itself.

    Raises:
        CheckFailed: a folder is not as it was written, or a check could not be made.
    """
    checks = []
    is_ours = base is None and (path / MANIFEST).is_file()
    given = None if is_ours else given_model(path, base)
    for check in check_folders(path) if given is None else [_check_given(given)]:
        checks.append(check)
        verdict = "BAD " if check.failed else "part" if check.unchecked else "good"
        log(f"{verdict}  {check.folder}: {', '.join(check.held)}".removesuffix(": "))
        for kind, lines in (("wrong", check.failed), ("not checked", check.unchecked)):
            for line in lines:
                log(f"      {kind}: {line}")
    print_json({"checks": checks})
    if bad := [str(check.folder) for check in checks if check.failed]:
        raise CheckFailed(f"not as scale wrote them: {', '.join(bad)}")
    if unchecked := [line for check in checks for line in check.unchecked]:
        raise CheckFailed(f"not everything could be checked: {unchecked[0]}")


def check_folders(path: Path) -> Iterator[FolderCheck]:
    """Check one folder, or every folder of a run, one after another.

    Skip half-written ones, whose names begin with a dot.
    """
    folders = [path]
    if not (path / MANIFEST).is_file():
        places = [manifest.relative_to(path).parent for manifest in path.rglob(MANIFEST)]
        hidden = [place for place in places if any(part.startswith(".") for part in place.parts)]
        folders = sorted(path / place for place in places if place not in hidden)
    if not folders:
        raise RunFolderError(
            f"{path}: scale did not write this folder: nothing in it has a {MANIFEST}"
        )
    yield from map(_check, folders)


def _checks_of(folder: Path) -> Iterator[tuple[str, Callable[[Path], str | None]]]:
    """Yield the name of each check that a folder needs, and what makes it; that may return why it left a part out."""
    yield "hashes", _check_files
    if BaseRecord.is_in(folder):
        yield "base", _check_base
    elif (given := given_model(folder, None)) is not None:  # an export that names its base
        yield "base", partial(_check_named_base, given)
    if ExportRecord.is_in(folder):
        yield "parity", _check_export


def _check(folder: Path) -> FolderCheck:
    check = FolderCheck(folder)
    for name, prove in _checks_of(folder):
        try:
            if left_out := prove(folder):
                check.unchecked.append(f"{name} on held-out text: {left_out}")
            check.held.append(name)
        except ScaleError as error:
            is_changed = isinstance(error, ChangedBaseError)
            not_at_hand = isinstance(error, BaseModelError) and not is_changed
            lines = check.unchecked if not_at_hand else check.failed
            lines.append(f"{name}: {error}")
            if prove is _check_files:
                break  # further checks of damaged files mean nothing
    return check


def _check_given(given: GivenModel) -> FolderCheck:
    """Check that a model fits its base, whose logits beside it are its own, bit for bit."""
    check = FolderCheck(Path(given.name), ["class, sizes and vocabulary"])
    if has_tokenizer(given.name):
        check.held.append("tokenizer")
    if note := other_base(given.name, given.base):
        log(f"note  {check.folder}: {note}")
    prompts = sample_ids(tokenizer_of_given(given.name, given.base))
    streams = move_to_device(load_given(given)).eval()
    wanted = own_logits(move_to_device(load_base(given.base)), prompts)
    for ids, of_base in zip(prompts, wanted, strict=True):
        logits, _ = streams.head_logits(ids)(slice(None))
        if not torch.equal(logits, of_base):
            raise PreservationError(f"{given.name}: the base's logits are not those of its own")
    check.held.append("base logits")
    return check


def _check_files(folder: Path) -> None:
    """Compare each file's size and SHA-256 with the manifest.

    Raise CheckFailed if there is a further file.
    """
    verify_folder(folder)
    present = [file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()]
    listed = described_files(folder).keys() | {MANIFEST}
    if extra := sorted({file.relative_to(folder).as_posix() for file in present} - listed):
        raise CheckFailed(f"{folder / extra[0]}: is not a file that scale wrote")


def _check_base(path: Path) -> None:
    """Compare the base's tokenizer and every tensor with their hashes."""
    folder = MethodFolder.at(path)
    folder.check_base()
    folder.load_base()


def _check_named_base(given: GivenModel, _folder: Path) -> None:
    load_given(given)  # compares both with the record


def _check_export(folder: Path) -> str:
    run = RunFolder(folder.parent.parent)
    if not (run.final / MANIFEST).is_file():
        raise BaseModelError("the trained model (final/) is not beside this export")
    config = load_config(folder / "scale.yaml")
    return check_written_export(config.model_copy(update={"output_dir": run.root}), folder)
