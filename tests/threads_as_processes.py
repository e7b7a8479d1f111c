"""Threads that stand for the processes of a launch: each has its share, and gets what the others hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_ident
from typing import Any, TypeVar

import pytest
from torch import Tensor

from scale_cli import processes
from scale_cli.processes import Share

Result = TypeVar("Result")


def in_processes(monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Share], Result]) -> list[Result]:
    """Return what `work` returns for every share, all of them at work together."""
    held: dict[int, Tensor] = {}
    places: dict[int, int] = {}
    meeting = Barrier(count, timeout=60)

    def gathered(mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        if len(lengths) == 1:
            return [mine]
        assert len(mine) == lengths[places[get_ident()]]
        held[places[get_ident()]] = mine
        meeting.wait()
        everyone = [held[place] for place in range(count)]
        meeting.wait()
        return everyone

    monkeypatch.setattr(processes, "gathered", gathered)

    def one(place: int) -> Any:
        places[get_ident()] = place
        return work(Share(place, count))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))
