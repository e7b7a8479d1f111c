"""Faults at the boundaries of what changes a disk: a process that dies there, a system call that fails there.

Every such call of Python is counted: opening for writing, writing, fsync, renaming, making, deleting; and the
tensor files, which Rust writes, as one call each. The n-th one is where the fault is.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import transformers.modeling_utils
from safetensors import SafetensorError

# A full disk can still be deleted from.
_NEEDS_ROOM = ("open", "write", "fsync", "mkdir", "tensors", "rename")
KILL = 0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Args:
        root: only what happens below it counts.
        at: which call, counted from 1; 0 for none.
        error: KILL, or an errno; ENOSPC stays, as a disk stays full; the others happen once.
        half: a write is done half before.
        counted: a file for what was counted, [kind, path] of each call, written as it goes.
    """

    root: Path
    at: int
    error: int = KILL
    half: bool = False
    counted: Path | None = None

    def __call__(self) -> None:
        """Put it into this process."""
        _Wrapped(self).install()


class _Wrapped:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_calls = 0
        self.lock = threading.Lock()
        self.real_open = io.open
        self.log = None if fault.counted is None else os.open(fault.counted, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)

    def install(self) -> None:
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            kind = "rename" if name == "replace" else name
            setattr(os, name, partial(self.call_on_path, kind, getattr(os, name)))
        os.fsync = partial(self.call_fsync, os.fsync)
        builtins.open = io.open = self.open
        tensors: Any = safetensors.torch
        modelling: Any = transformers.modeling_utils
        tensors.save_file = partial(self.save_tensors, tensors.save_file)  # imported where it is called
        modelling.safe_save_file = partial(self.save_tensors, modelling.safe_save_file)

    def is_below(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(str(self.fault.root))

    def reached(self, kind: str, path: object) -> bool:
        """Count one call, and return whether the fault is here."""
        with self.lock:
            self.num_calls += 1
            if self.log is not None:
                os.write(self.log, (json.dumps([kind, str(path)]) + "\n").encode())
            fault = self.fault
            stays = fault.error == errno.ENOSPC and self.num_calls > fault.at and kind in _NEEDS_ROOM
            return bool(fault.at) and (self.num_calls == fault.at or stays)

    def fail(self, *path: str) -> NoReturn:
        if self.fault.error == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.fault.error, os.strerror(self.fault.error), *path)

    def call_on_path(self, kind: str, real: Callable[..., Any], path: Any, *arguments: Any, **options: Any) -> Any:
        counts = self.is_below(path) or options.get("dir_fd") is not None
        if counts and self.reached(kind, path):
            self.fail(str(path))
        return real(path, *arguments, **options)

    def call_fsync(self, real: Callable[[int], None], descriptor: int) -> None:
        if self.reached("fsync", descriptor):
            self.fail()
        real(descriptor)

    def open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not self.is_below(file) or not set(mode) & set("wax+"):
            return self.real_open(file, mode, *arguments, **options)
        if self.reached("open", file):
            self.fail(str(file))
        return _Written(self.real_open(file, mode, *arguments, **options), self)

    def save_tensors(self, real: Callable[..., Any], tensors: Any, path: Any, **options: Any) -> None:
        if not self.reached("tensors", path):
            real(tensors, path, **options)
            return
        if self.fault.half:
            real(tensors, path, **options)
            os.truncate(path, Path(path).stat().st_size // 2)
        if self.fault.error == KILL:
            self.fail()
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(self.fault.error)}")


class _Written:
    """A file whose writes count."""

    def __init__(self, file: Any, wrapped: _Wrapped) -> None:
        self._file, self._wrapped = file, wrapped

    def write(self, content: Any) -> Any:
        if self._wrapped.reached("write", self._file.name):
            if self._wrapped.fault.half:
                self._file.write(content[: len(content) // 2])
                self._file.flush()
            self._wrapped.fail()
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
