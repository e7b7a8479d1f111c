"""Signals at chosen moments: a process sends them to itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scale_cli.data import tokenise
from scale_cli.training import checkpoint, observing, step


@dataclass(frozen=True)
class SignalAt:
    """A signal at the n-th call of something, counted from 1.

    Args:
        place: `micro-batch`, `evaluation`, `save` or `tokenisation`.
        call: which one.
        number: of the signal.
        times: how often it is sent, one after the other.
    """

    place: str
    call: int
    number: int
    times: int = 1

    def __call__(self) -> None:
        """Put it into this process."""
        places: dict[str, tuple[Any, str]] = {
            "micro-batch": (step, "loss_share"),
            "evaluation": (observing, "score_corpus"),
            "save": (checkpoint, "write_checkpoint"),
            "tokenisation": (tokenise._Shards, "append"),
        }
        owner, name = places[self.place]
        setattr(owner, name, self._signalling(getattr(owner, name)))

    def _signalling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        num_calls = 0

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == self.call:
                for _ in range(self.times):
                    os.kill(os.getpid(), self.number)
                    time.sleep(0.01)
                if threading.current_thread() is not threading.main_thread():
                    time.sleep(0.3)  # the training thread notices while this one is at work
            return real(*arguments, **options)

        return call
