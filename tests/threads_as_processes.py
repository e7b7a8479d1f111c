"""Threads that stand for the processes of a launch: each has its share, and gets what the others hold."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import Any, TypeVar

import pytest

from scale_cli.processes import Share

Result = TypeVar("Result")


def in_processes(
    monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Share], Result]
) -> list[Result]:
    """Return what `work` returns for every share, all of them at work together."""
    held: dict[int, Any] = {}
    meeting = Barrier(count, timeout=60)
    process = local()

    def gather_object(mine: list[Any]) -> list[Any]:
        held[process.index] = mine[0]
        meeting.wait()
        everyone = [held[place] for place in range(count)]
        meeting.wait()
        return everyone

    monkeypatch.setattr("accelerate.utils.gather_object", gather_object)

    def work_as(place: int) -> Result:
        process.index = place
        return work(Share(place, count))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work_as, range(count)))
