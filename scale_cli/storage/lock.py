"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scale_cli.errors import RunFolderError


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Make a folder if need be and hold it; another process that wants it waits.

    The system lets go when a process ends, however it ends. Where the other renamed or removed the folder, whoever
    waited gets a new one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another removed it in between
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still(folder, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _is_still(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder; another process that wants it is refused.

    Where a file system knows no locks, nobody is.

    Raises:
        RunFolderError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(f"{folder}: another process is training here; wait for it, or end it") from None
        yield
    finally:
        os.close(descriptor)
