"""metrics.jsonl: one JSON object a line, no step twice and none missing, whatever was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import write_text


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read every whole record of a log; there is none where there is no log.

    Raises:
        StorageError: naming the line that is not a record of ours.
    """
    records = []
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{path}:{number}: damaged, not a record of ours; remove the line") from None
        records.append(record)
    return records


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # A line without its newline was cut off in the middle of a write.
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return whole.splitlines()


class MetricsLog:
    """Appends records to a file; a resumed run first drops what came after its checkpoint."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        kept = [
            line
            for line, record in zip(_whole_lines(path), read_records(path), strict=True)
            if int(record["step"]) <= resumed_step
        ]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; it is on its way to the disk before the next step starts."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Make what was appended durable, before a checkpoint that counts on it."""
        with self._path.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
