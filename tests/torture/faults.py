"""What is put into a process: a fault at the n-th call that changes a disk, a signal at a chosen moment.

A fault is a process that dies there, or a system call that fails there. Every such call of Python is counted: opening
for writing, writing, fsync, renaming, making, deleting; and the tensor files, which Rust writes, as one call each.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import transformers.modeling_utils
from safetensors import SafetensorError

from scale_cli.data import tokens
from scale_cli.evaluation import scoring
from scale_cli.training import step, training_run

# A full disk can still be deleted from.
_NEEDS_ROOM = ("open", "write", "fsync", "mkdir", "tensors", "rename")
KILL = 0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where."""

    root: Path  # only what happens below it counts
    at: int  # which call, counted from 1; 0 for none
    error: int = KILL  # or an errno; ENOSPC stays, as a disk stays full; the others happen once
    half: bool = False  # a write is done half before
    counted: Path | None = (
        None  # a file for what was counted, [kind, path] of each call, written as it goes
    )

    def __call__(self) -> None:
        """Put it into this process."""
        _Wrapped(self).install()


class _Wrapped:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_calls = 0
        self.lock = threading.Lock()
        self.real_open = io.open
        self.log = (
            None
            if fault.counted is None
            else os.open(fault.counted, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        )

    def install(self) -> None:
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            kind = "rename" if name == "replace" else name
            setattr(os, name, partial(self.call_on_path, kind, getattr(os, name)))
        os.fsync = partial(self.call_fsync, os.fsync)
        builtins.open = io.open = self.open
        tensors: Any = safetensors.torch
        modelling: Any = transformers.modeling_utils
        tensors.save_file = partial(
            self.save_tensors, tensors.save_file
        )  # imported where it is called
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
            stays = (
                fault.error == errno.ENOSPC and self.num_calls > fault.at and kind in _NEEDS_ROOM
            )
            return bool(fault.at) and (self.num_calls == fault.at or stays)

    def fail(self, *path: str) -> NoReturn:
        if self.fault.error == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.fault.error, os.strerror(self.fault.error), *path)

    def call_on_path(
        self, kind: str, real: Callable[..., Any], path: Any, *arguments: Any, **options: Any
    ) -> Any:
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

    def save_tensors(
        self, real: Callable[..., Any], tensors: Any, path: Any, **options: Any
    ) -> None:
        if not self.reached("tensors", path):
            real(tensors, path, **options)
            return
        if self.fault.half:
            real(tensors, path, **options)
            os.truncate(path, Path(path).stat().st_size // 2)
        if self.fault.error == KILL:
            self.fail()
        raise SafetensorError(
            f"Error while serializing: I/O error: {os.strerror(self.fault.error)}"
        )


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


@dataclass(frozen=True)
class SignalAt:
    """A signal that a process sends to itself, at the n-th call of something."""

    place: str  # `micro-batch`, `evaluation`, `save` or `tokenisation`
    call: int  # which one, counted from 1
    number: int  # of the signal
    times: int = 1  # how often it is sent, one after the other

    def __call__(self) -> None:
        """Put it into this process."""
        places: dict[str, tuple[Any, str]] = {
            "micro-batch": (step, "loss_share"),
            "evaluation": (scoring, "score_corpus"),
            "save": (training_run, "write_checkpoint"),
            "tokenisation": (tokens._Columns, "append"),
        }
        owner, name = places[self.place]
        setattr(owner, name, self._signalling(getattr(owner, name)))

    def _signalling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        num_calls = 0

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == self.call:
                for _ in range(self.times):
                    os.kill(os.getpid(), self.number)
                    time.sleep(0.01)
                if threading.current_thread() is not threading.main_thread():
                    time.sleep(0.3)  # the training thread notices while this one is at work
            return real(*arguments, **options)

        return call
