"""The command line in this process: seconds of importing torch are spent once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


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

    def error(self, exit_code: int = 2) -> str:
        """Return its error message, having checked the exit code, and that there is one message, of one line."""
        assert self.exit_code == exit_code, self.stdout + self.stderr
        assert self.stderr.startswith("error: ")
        assert self.stderr.endswith("\n")
        assert self.stderr[:-1].isprintable(), self.stderr
        return self.stderr[len("error: ") : -1]


Scale = Callable[..., Outcome]


@contextmanager
def refused(kind: type[Exception] | tuple[type[Exception], ...], told: str) -> Iterator[None]:
    """Expect an error whose message is one line, and what is in it."""
    with pytest.raises(kind, match=told) as caught:
        yield
    assert "\n" not in str(caught.value)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Put back the handlers of signals that a verb sets in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
