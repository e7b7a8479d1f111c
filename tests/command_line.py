"""The command line in this process: seconds of importing torch are spent once."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scale_cli.cli import main


class ModelLoads(BaseException):
    """Raised in place of loading a model: whatever came so far was taken."""


def model_loads(*_: object, **__: object) -> None:
    raise ModelLoads


@dataclass(frozen=True)
class Outcome:
    """What a command line ended with."""

    exit_code: int | None  # None where the model would have loaded
    stdout: str
    stderr: str  # without progress bars

    def error(self) -> str:
        """Return its error message, having checked that there is one, of one line, and nothing else."""
        assert self.exit_code not in (None, 0), self.stdout
        assert self.stderr.startswith("error: ")
        assert self.stderr.endswith("\n")
        assert self.stderr[:-1].isprintable(), self.stderr
        return self.stderr[len("error: ") : -1]


Scale = Callable[..., Outcome]


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Put back the handlers of signals that a verb sets in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def command_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Scale:
    """Return a function that runs a command line of `scale` in this process."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["scale", *map(str, arguments)])
        capfd.readouterr()
        code: int | None
        try:
            with handlers_put_back():
                main()
        except SystemExit as ended:
            assert ended.code is None or isinstance(ended.code, int)
            code = ended.code or 0
        except ModelLoads:
            code = None
        shown = capfd.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return Outcome(code, shown.out, re.sub(r"\r[^\r\n]*(?=\r)|\r *\r?(?=[^\n]|$)", "", shown.err))

    return run
