"""Verbs in processes of their own that start in a moment: forked from a server that has imported everything.

Not from the process of the tests: autograd refuses to work in a fork of a process in which it has worked.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

# More than any verb here takes on a busy machine: past it, something hangs.
PATIENCE_S = 240

Hook = Callable[[], object]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.torture.preloaded"])


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that killed it; and what it printed."""

    exit_code: int
    printed: str


class Verb:
    """A verb of the command line, in a process of its own."""

    def __init__(
        self, *arguments: str, hook: Hook | None = None, environment: dict[str, str] | None = None
    ) -> None:
        handle, name = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self._printed = Path(name)
        self.process: BaseProcess = FORKS.Process(
            target=_run, args=(arguments, hook, environment or {}, name)
        )
        self.process.start()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.process.pid, number)

    def ended(self, within_s: float = PATIENCE_S) -> Ended:
        """Wait for its end; a process that hangs fails the test."""
        self.process.join(within_s)
        hangs = self.process.exitcode is None
        if hangs:
            self.process.kill()
            self.process.join()
        printed = self._printed.read_text(encoding="utf-8", errors="replace")
        self._printed.unlink()
        assert not hangs, f"hangs after:\n{printed}"
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, printed)

    def is_killed_after(self, delay_s: float) -> bool:
        """Kill it after a while, unless it has ended by then; return whether it was killed."""
        self.process.join(delay_s)
        self.process.kill()
        return self.ended().exit_code == -signal.SIGKILL


def run_verb(*arguments: str, hook: Hook | None = None) -> Ended:
    return Verb(*arguments, hook=hook).ended()


def start_group(*arguments: str, num_processes: int, hook: Hook | None = None) -> list[Verb]:
    """Start a verb in several processes that know of each other, as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_processes),
    }
    ranks = [str(rank) for rank in range(num_processes)]
    return [
        Verb(*arguments, hook=hook, environment={**common, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ranks
    ]


def ended_group(verbs: list[Verb]) -> list[Ended]:
    """Wait for all; where one fails, kill the others, as a launcher would."""
    deadline_s = time.monotonic() + PATIENCE_S
    while any(verb.process.exitcode is None for verb in verbs) and time.monotonic() < deadline_s:
        if any(verb.process.exitcode for verb in verbs):
            time.sleep(0.5)  # what it did before it ended may end the others too
            for verb in verbs:
                verb.process.kill()
        time.sleep(0.02)
    return [verb.ended(1) for verb in verbs]


def _run(
    arguments: tuple[str, ...], hook: Hook | None, environment: dict[str, str], printed: str
) -> None:
    """Do what `python -m scale_cli ARGUMENTS` does, after a hook."""
    os.environ.update(environment)

    # A fork makes its pool of threads anew when it first asks for it. Threads that ask at once, as those that load
    # weights do, may find none: "Invalid thread pool!".
    torch.set_num_threads(1)

    with Path(printed).open("w", buffering=1) as log:
        sys.stdout = sys.stderr = log
        code: object = 0
        try:
            if hook is not None:
                hook()
            sys.argv = ["scale", *arguments]
            from scale_cli.cli import main

            main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 70
        log.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
