"""Where the time of a step goes: marks between its phases, on the device's own clock."""

from __future__ import annotations

import time

import torch

PHASES = ("data", "forward", "backward", "optimiser")


class Clock:
    """Times phases; on a GPU by events, so that asking never makes the device wait."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks.clear()
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Say that everything since the last mark was this phase."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def phases_s(self) -> dict[str, float]:
        """Return the seconds of each phase of the step that has ended, in order of PHASES."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                seconds[phase] += after - before
            elif isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                seconds[phase] += before.elapsed_time(after) / 1000
        return seconds
