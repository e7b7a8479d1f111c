"""The JSON files in the folders of a run: one type per file, defined beside what fills it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import TypeAdapter, ValidationError

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import read_json, write_json

_adapter_of = cache(TypeAdapter)  # building one takes longer than a hundred validations


class RunRecord:
    """A dataclass that is saved in a folder as JSON; unknown keys are ignored."""

    FILE: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(cast("Any", self))

    def save(self, folder: Path) -> None:
        write_json(folder / self.FILE, self.to_json())

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return cast("Self", _adapter_of(cast("Any", cls)).validate_python(value))

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / cls.FILE).is_file()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the file; StorageError if it is missing, or holds something else."""
        value = read_json(folder / cls.FILE)
        try:
            return cls.from_json(value)
        except (ValidationError, KeyError, TypeError):
            raise StorageError(
                f"{folder / cls.FILE}: damaged, or written by another version"
            ) from None

    @classmethod
    def load_if_there(cls, folder: Path) -> Self | None:
        return cls.load(folder) if cls.is_in(folder) else None
