"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scale_cli.errors import RunFolderError

# Folders that this process has claimed: a verb that runs other verbs holds theirs.
_held: set[str] = set()


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Make a folder if need be and hold it; another process that wants it waits.

    The system lets go when a process ends, however it ends. Where the other renamed or removed the folder, whoever
    waited gets a new one.
    """
    descriptor = _taken(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a folder if need be and hold it; another process that wants it is refused.

    Whoever holds it already in this process goes on holding it. What was made for it and is empty in the end goes.
    Where a file system knows no locks, nobody is refused.
    """
    place = os.path.realpath(folder)
    if place in _held:
        yield
        return
    new = [missing for missing in (folder, *folder.parents) if not missing.exists()]
    try:
        descriptor = _taken(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(f"{folder}: another process is at work here; wait for it, or end it") from None
    _held.add(place)
    try:
        yield
    finally:
        _held.discard(place)
        with suppress(OSError):  # something came of it
            for made in new:
                made.rmdir()
        os.close(descriptor)


def _taken(folder: Path, operation: int) -> int:
    """Make a folder if need be, lock it, and return its descriptor."""
    while True:
        make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:  # another made it
            pass
        except FileNotFoundError:
            if folder.parent.is_dir():  # of a file system that makes none, as /proc; else another removed it
                raise
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another removed it in between
            continue
        try:
            _lock(descriptor, operation)
            if _is_still(folder, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        if not operation & fcntl.LOCK_NB:
            raise


def _is_still(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def make_folder(folder: Path) -> None:
    """Make a folder and what it lies in, and each new name durable."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # of itself it names no file
    finally:
        os.close(descriptor)
