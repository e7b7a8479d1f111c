"""Threads that stand for the processes of a launch: each has its share, and gets what the others hold."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import pytest

from scale_cli import processes
from scale_cli.processes import Share

Result = TypeVar("Result")


def in_processes(
    monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Share], Result]
) -> list[Result]:
    """Return what `work` returns for every share, all of them at work together."""
    held: dict[int, Any] = {}
    meeting = Barrier(count, timeout=60)

    def gathered(mine: Any, share: Share) -> list[Any]:
        if share.num_processes == 1:
            return [mine]
        held[share.index] = mine
        meeting.wait()
        everyone = [held[place] for place in range(count)]
        meeting.wait()
        return everyone

    monkeypatch.setattr(processes, "gathered", gathered)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda place: work(Share(place, count)), range(count)))
