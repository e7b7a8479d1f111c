"""Requests to stop before the last step, by a signal or the time limit; all processes agree on
them.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor

from scale_cli.terminal import shows_lines

# The signals caught have numbers above 1, so that by the maximum a signal wins over the clock.
OUT_OF_TIME = 1
_STDERR = 2  # written to in a signal handler, past every buffer
_STOPPING = (
    b"\nstopping after this step at the latest, with a checkpoint; "
    b"a second Ctrl-C ends it now, and loses what is not saved\n"
)


class StopNow(BaseException):
    """Leave a step or an evaluation half-way, before it has any effect.

    A BaseException, so that libraries' `except Exception` cannot swallow it.
    """


class StopRequest:
    """The requests to this process to stop.

    A process that is alone stops between two micro-batches or within an evaluation. Several
    processes stop at the end of a step: their requests are summed with the step's losses, and the
    sum is read one step later, once it is there.
    """

    def __init__(self, max_hours: float | None, *, alone: bool) -> None:
        self.signals: list[int] = []
        self._alone = alone
        # The last step's sum, on its way to the CPU.
        self._coming: tuple[Tensor, torch.Event | None] | None = None
        self._leaving = False
        self._deadline_s = (
            float("inf") if max_hours is None else time.monotonic() + 3600 * max_hours
        )

    def mine(self) -> int:
        """Return this process's request: a signal's number, 1 for the clock, 0 for none."""
        is_late = time.monotonic() > self._deadline_s
        return self.signals[0] if self.signals else OUT_OF_TIME * is_late

    def agreed(self, accelerator: Accelerator, asked: Tensor) -> int:
        """Return the largest request of any process, the same on all; several processes learn of it
        a step later.

        `asked` is the sum of all processes' requests in the last step; the device may still be
        computing it.
        """
        if self._alone:
            return self.mine()
        before = self._coming
        summed = asked.to("cpu", non_blocking=True)
        arrived = None
        if asked.is_cuda:
            arrived = torch.Event(asked.device)
            arrived.record()
        self._coming = summed, arrived
        if before is None:
            return 0
        summed, arrived = before
        if arrived is not None:
            arrived.synchronize()
        return largest_of_all(accelerator, self.mine()) if summed.item() else 0

    def between_micro_batches(self, *, clock_too: bool) -> None:
        """Leave the current step (StopNow) if this process is alone and was asked to stop.

        In the first step the clock does not count: with a limit shorter than a step, no run would
        ever advance.
        """
        if self._alone and (self.signals or (clock_too and self.mine())):
            raise StopNow

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the body at once (StopNow); for work that has no effect until it is
        done.
        """
        self._leaving = self._alone
        try:
            self._leave_if_asked()
            yield
        finally:
            self._leaving = False

    def _leave_if_asked(self) -> None:
        if self._leaving and self.signals:
            self._leaving = False
            raise StopNow

    def catch(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: remember it; a second SIGINT ends the process at once, like a kill."""
        if signal.SIGINT in self.signals and number == signal.SIGINT:
            # An orderly exit would abort while other threads run torch code.
            os.write(_STDERR, b"stopped at once; what was not saved is lost\n")
            os._exit(128 + number)
        if not self.signals and shows_lines():
            os.write(_STDERR, _STOPPING)
        self.signals.append(number)
        self._leave_if_asked()


def largest_of_all(accelerator: Accelerator, number: int) -> int:
    """Return the largest number of any process; every process must call this."""
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max().item())


@contextmanager
def stop_requests(max_hours: float | None, *, alone: bool) -> Iterator[StopRequest]:
    """Collect SIGTERM and SIGINT as requests to stop; after `max_hours` the clock requests it too."""
    request = StopRequest(max_hours, alone=alone)
    previous = {
        number: signal.signal(number, request.catch) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def command_to_go_on(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the command line that continues an interrupted run: the same one, for `train` with
    `--resume auto`.
    """
    again = list(arguments)
    if again[0] == "train" and again[-2:] != ["--resume", "auto"]:
        again += ["--resume", "auto"]  # the last --resume counts
    num_processes = int(environment.get("WORLD_SIZE", "1"))
    launched = ["accelerate", "launch", "--num_processes", str(num_processes), "-m", "scale_cli"]
    return shlex.join([*(launched if num_processes > 1 else ["scale"]), *again])
