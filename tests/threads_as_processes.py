"""Threads that stand for the processes of a launch: each has its share, and gets what the others hold."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest
from torch import Tensor

from scale_cli import processes
from scale_cli.processes import Share

Result = TypeVar("Result")


def in_processes(monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Share], Result]) -> list[Result]:
    """Return what `work` returns for every share, all of them at work together."""
    held: dict[int, list[Tensor]] = {}
    meeting = Barrier(count, timeout=60)

    def gathered(mine: list[Tensor], share: Share) -> list[Tensor]:
        if share.num_processes == 1:
            return mine
        held[share.index] = mine
        meeting.wait()
        everyone = [tensor for place in range(count) for tensor in held[place]]
        meeting.wait()
        return everyone

    monkeypatch.setattr(processes, "gathered", gathered)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda place: work(Share(place, count)), range(count)))
