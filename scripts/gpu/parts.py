"""Parts of a measurement on a borrowed device: each has a limit, and one that fails does not end the rest."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scale_cli.storage.atomic import write_json

_LINES_SHOWN = 30  # of a part's own output, in the terminal; all of it is in its log


@dataclass(frozen=True)
class Part:
    """One command of a measurement."""

    name: str
    limit_s: float
    command: Sequence[str]  # of Python: what follows `python`


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    exit_code: int | None  # None: not begun, or killed at its limit
    elapsed_s: float
    said: str  # "done", "failed", "over its limit of N s", "not begun: no time was left"


def run_parts(parts: Sequence[Part], output: Path, budget_s: float) -> list[Outcome]:
    """Run the parts in order and write OUTPUT/summary.json after each.

    Args:
        parts: the commands; what takes longest to fail comes last.
        output: gets NAME.log of every part; the parts' own files too.
        budget_s: seconds for all parts together. A part gets what is left, at most its limit.
    """
    output.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    started_s = time.monotonic()
    for part in parts:
        left_s = budget_s - (time.monotonic() - started_s)
        if left_s <= 0:
            outcome = Outcome(part.name, None, 0.0, "not begun: no time was left")
        else:
            outcome = _run(part, output / f"{part.name}.log", min(part.limit_s, left_s))
        outcomes.append(outcome)
        write_json(output / "summary.json", {"parts": [asdict(one) for one in outcomes]})
        print(f"== {part.name}: {outcome.said} ({outcome.elapsed_s:.0f} s)", flush=True)
    return outcomes


def _run(part: Part, log: Path, limit_s: float) -> Outcome:
    started_s = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers it has started
            process.wait()
            exit_code = None

    elapsed_s = time.monotonic() - started_s
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-_LINES_SHOWN:]), flush=True)
    if exit_code is None:
        return Outcome(part.name, None, elapsed_s, f"over its limit of {limit_s:.0f} s")
    return Outcome(part.name, exit_code, elapsed_s, "failed" if exit_code else "done")


def main(describe: str, parts_of: Callable[[Path, bool], Sequence[Part]], budget_s: float) -> None:
    """Run a script made of parts, as its command line says.

    Args:
        describe: one line for --help.
        parts_of: the parts, for an output folder, at full size or at a processor's.
        budget_s: seconds for all parts together on a device, if the command line does not say.
    """
    parser = argparse.ArgumentParser(description=describe)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--small", action="store_true", help="try the script on a processor")
    parser.add_argument("--only", default="", help="comma-separated names of parts")
    parser.add_argument("--budget", type=float, help=f"seconds for all parts; {budget_s:.0f}")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    given = parser.parse_args()

    parts = list(parts_of(given.output, given.small))
    if given.small:  # the limits are for a device
        parts = [replace(part, limit_s=10 * part.limit_s) for part in parts]
        budget_s *= 10
    wanted = [name.strip() for name in given.only.split(",") if name.strip()]
    unknown = sorted(set(wanted) - {part.name for part in parts})
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; see --list")
    if wanted:
        parts = [part for part in parts if part.name in wanted]
    if given.list:
        print("\n".join(f"{part.name:24} at most {part.limit_s:.0f} s" for part in parts))
        return

    outcomes = run_parts(parts, given.output, given.budget or budget_s)
    print(json.dumps({outcome.name: outcome.said for outcome in outcomes}, indent=1))
    if any(outcome.exit_code != 0 for outcome in outcomes):
        sys.exit(1)
