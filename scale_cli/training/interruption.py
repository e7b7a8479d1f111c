"""Why a run should stop before its last step: a signal, or its time is over; all processes agree on it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator

# Signals are numbers above 1, so that one of them wins over the clock.
_OUT_OF_TIME = 1


class StopRequest:
    """What has asked this process to stop, if anything.

    Args:
        max_hours: after which the clock asks; None for never.
    """

    def __init__(self, max_hours: float | None) -> None:
        self.signals: list[int] = []
        self._deadline_s = float("inf") if max_hours is None else time.monotonic() + 3600 * max_hours

    def agreed(self, accelerator: Accelerator) -> int:
        """Return what any process was asked by: a signal's number, 1 for the clock, 0 for nothing; the same on all."""
        mine = self.signals[0] if self.signals else _OUT_OF_TIME * (time.monotonic() > self._deadline_s)
        if accelerator.num_processes == 1:
            return mine
        asked = accelerator.gather(torch.tensor([mine], device=accelerator.device))
        return int(asked.max().item())


@contextmanager
def stop_requests(max_hours: float | None) -> Iterator[StopRequest]:
    """Collect SIGTERM and SIGINT instead of dying of them; a second SIGINT stops at once."""
    request = StopRequest(max_hours)

    def catch(number: int, _frame: FrameType | None) -> None:
        if signal.SIGINT in request.signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signals.append(number)

    previous = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def describe_stop(asked: int) -> tuple[str, int]:
    """Return what stopped the run in words, and the exit code that goes with it."""
    if asked == _OUT_OF_TIME:
        return "stopped: train.max_hours are over,", 0
    return f"stopped by {signal.Signals(asked).name}", 128 + asked
