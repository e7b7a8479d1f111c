"""Why a run should stop before its last step: a signal, or its time is over; all processes agree on it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor

# Signals are numbers above 1, so that one of them wins over the clock.
_OUT_OF_TIME = 1


class StopNow(BaseException):
    """Leaves a step or an evaluation half-way; nothing of it has had any effect.

    Not an Exception: no library on the way takes it for an error of its own.
    """


class StopRequest:
    """What has asked this process to stop, if anything.

    A process that is alone stops between two micro-batches and within an evaluation. Several stop at the ends of steps:
    what each was asked by is summed with the step's losses, and the sum is read a step later, when it has come.
    """

    def __init__(self, max_hours: float | None, *, alone: bool) -> None:
        self.signals: list[int] = []
        self._alone = alone
        self._coming: tuple[Tensor, torch.Event | None] | None = None  # of the last step: on the CPU, once it is there
        self._leaving = False
        self._deadline_s = float("inf") if max_hours is None else time.monotonic() + 3600 * max_hours

    def mine(self) -> int:
        """Return what this process was asked by: a signal's number, 1 for the clock, 0 for nothing."""
        return self.signals[0] if self.signals else _OUT_OF_TIME * (time.monotonic() > self._deadline_s)

    def agreed(self, accelerator: Accelerator, asked: Tensor) -> int:
        """Return what any process was asked by, the same on all: where there are several, in the step before the last.

        `asked` is what all were asked by in the last step, summed, on the device, which may still be at work on it.
        """
        if self._alone:
            return self.mine()
        coming, self._coming = self._coming, _on_its_way(asked)
        if coming is None:
            return 0
        summed, arrived = coming
        if arrived is not None:
            arrived.synchronize()
        if not summed.item():
            return 0
        return int(accelerator.gather(torch.tensor([self.mine()], device=accelerator.device)).max().item())

    def between_micro_batches(self, *, clock_too: bool) -> None:
        """Leave the step under way (StopNow), if this process is alone and was asked to stop.

        By the clock not in the first step: a budget shorter than a step would never come to its end.
        """
        if self._alone and (self.signals or (clock_too and self.mine())):
            raise StopNow

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the body where it stands (StopNow); for work without any effect until it is done."""
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
        """Handle a signal: remember it; a second SIGINT ends the process where it stands, as a kill would."""
        if signal.SIGINT in self.signals and number == signal.SIGINT:
            # Threads at work in torch's code would abort an interpreter that ends in order.
            os.write(sys.stderr.fileno(), b"stopped at once; what was not saved is lost\n")
            os._exit(128 + number)
        self.signals.append(number)
        self._leave_if_asked()


def _on_its_way(number: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Return a number's copy on the CPU, and what tells when it is there; nobody waits for the device."""
    if number.device.type != "cuda":
        return number.to("cpu"), None
    copy = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    arrived = torch.Event(number.device)
    arrived.record()
    return copy, arrived


@contextmanager
def stop_requests(max_hours: float | None, *, alone: bool) -> Iterator[StopRequest]:
    """Collect SIGTERM and SIGINT instead of dying of them; after `max_hours` the clock asks to stop too."""
    request = StopRequest(max_hours, alone=alone)
    previous = {number: signal.signal(number, request.catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def describe_stop(asked: int) -> tuple[str, int]:
    """Return what stopped the run in words, and the exit code that goes with it."""
    if asked == _OUT_OF_TIME:
        return "stopped by train.max_hours", 0
    return f"stopped by {signal.Signals(asked).name}", 128 + asked


def command_to_go_on(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the command line that goes on with an interrupted run: the same one, and `train` has to be told to."""
    again = list(arguments)
    if again[0] == "train" and again[-2:] != ["--resume", "auto"]:
        again += ["--resume", "auto"]  # the last of several counts
    num_processes = int(environment.get("WORLD_SIZE", "1"))
    launched = ["accelerate", "launch", "--num_processes", str(num_processes), "-m", "scale_cli"]
    return shlex.join([*(launched if num_processes > 1 else ["scale"]), *again])
