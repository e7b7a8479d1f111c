"""The SHA-256 of source files, read through once: while the file system says that a file is the same, it is remembered.

The record lies in the cache beside what was tokenised (`.sources.json`). A file is the same by its inode, size, and the
times of its last write and last change; the latter is the system's own and cannot be set back. A file that has changed
just now is not remembered, for another change might fall into the same tick of that clock. Damage that a disk does
without telling is found in what was tokenised, by `scale verify`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import file_sha256, read_json, write_json

_RECORD = ".sources.json"
# Fewer bytes are hashed in a millisecond.
_LEAST_BYTES = 1 << 20
_SETTLED_NS = 2 * 10**9


class SourceHashes:
    """The hashes of source files, each computed once."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / _RECORD
        self._new: dict[str, dict[str, Any]] = {}

    def sha256(self, file: Path) -> str:
        """Return a file's hash, of the record where the file is the same."""
        before = _stamp(file)
        if before["bytes"] < _LEAST_BYTES:
            return file_sha256(file)
        name = str(file.resolve())
        known = self._recorded.get(name)
        if isinstance(known, dict) and known.items() >= before.items() and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        started_ns, sha256 = time.time_ns(), file_sha256(file)
        last_ns = max(before["written_ns"], before["changed_ns"])
        if _stamp(file) == before and last_ns + _SETTLED_NS < started_ns:
            self._new[name] = {**before, "sha256": sha256}
        return sha256

    @cached_property
    def _recorded(self) -> dict[str, Any]:
        try:
            recorded = read_json(self._path)
        except StorageError:
            return {}
        return recorded if isinstance(recorded, dict) else {}

    def remember(self) -> None:
        """Add what was computed to the record; where that cannot be written, it is computed again another time."""
        if self._new:
            with suppress(StorageError):
                write_json(self._path, self._recorded | self._new)


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {
        "inode": status.st_ino,
        "bytes": status.st_size,
        "written_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
