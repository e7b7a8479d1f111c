"""metrics.jsonl: one JSON object a line, no step twice and none missing, whatever was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import write_text


class MetricsLog:
    """Appends records to a file; a resumed run first drops what came after its checkpoint."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        kept = [line for number, line in enumerate(self._lines(), 1) if self._step(line, number) <= resumed_step]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def _step(self, line: str, number: int) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{self._path}:{number}: damaged, not a record of ours; remove the line") from None

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        # A line without its newline was cut off in the middle of a write.
        whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        return whole.splitlines()

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; it is on its way to the disk before the next step starts."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Make what was appended durable, before a checkpoint that counts on it."""
        with self._path.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
