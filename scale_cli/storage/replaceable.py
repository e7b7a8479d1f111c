"""Whether what lies at an output may be replaced: nothing does, or an earlier result of the same kind alone."""

from __future__ import annotations

from pathlib import Path

from scale_cli.errors import RunFolderError, StorageError
from scale_cli.storage.atomic import MANIFEST, described_files, read_json


def check_replaceable(output: Path, kind: str) -> None:
    """Refuse a folder that holds anything but a result of one kind, whole and with nothing added."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    refusal = RunFolderError(f"--output {output}: holds something other than a {kind}; choose a new folder")
    if not output.is_dir():
        raise refusal
    try:
        there_is = read_json(output / "report.json")["kind"]
        ours = {*described_files(output), MANIFEST}
    except (StorageError, OSError, KeyError, TypeError):
        raise refusal from None
    if there_is != kind:
        raise refusal
    there = {path.relative_to(output).as_posix() for path in output.rglob("*")}
    if added := sorted(there - ours):
        raise RunFolderError(f"--output {output}: holds {added[0]}, which is not of the {kind}; choose a new folder")
