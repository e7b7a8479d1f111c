"""What every verb has in common at the terminal: its config, what it prints, and how it ends."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import typer
from safetensors import SafetensorError

from scale_cli.errors import ConfigError, EndedElsewhere, Interrupted, RunError, ScaleError, StorageError, UsageError
from scale_cli.printable import printable, without_passwords
from scale_cli.processes import leave, lost_peers_named

if TYPE_CHECKING:
    from scale_cli.config.schema import RunConfig


class Summary(Protocol):
    """What a verb returns, on the process that speaks."""

    def lines(self) -> list[str]:
        """Return the lines to print."""


def asked(flag: str, meaning: str) -> str:
    """Ask for what a flag would have said, or refuse where nobody can answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{flag}: not given ({meaning}), and there is no terminal to ask at")
    answer: str = typer.prompt(f"{flag}, {meaning}")
    return answer


def typed() -> Iterator[str]:
    """Yield what is typed at the terminal, line by line, until its end (Ctrl-D)."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip():
            yield line


def load(path: Path, overrides: list[str] | None) -> RunConfig:
    """Return the config of a file or of a run's folder, after a look at where its results will land."""
    from scale_cli.config.load import load_config
    from scale_cli.storage.layout import RunFolder

    if path.is_dir():  # of a run: its own config, wherever it lies now
        overrides = [f"output_dir={json.dumps(str(path))}", *(overrides or [])]
        path = RunFolder(path).config
    config = load_config(path, overrides)
    check_output(config.output_dir)
    quieten_libraries()
    return config


def run_folder(path: Path) -> Path:
    """Return the folder of the run that a config is of, or the folder that was given itself."""
    if not path.is_file():
        return path
    from scale_cli.config.load import load_config

    return load_config(path).output_dir


def numbers(option: str, written: str) -> list[float]:
    """Return the numbers that an option names, with commas between them."""
    try:
        given = [float(number) for number in written.split(",")]
    except ValueError:
        given = []
    if not given or not all(map(math.isfinite, given)):
        raise ConfigError(f"{option} {written}: give numbers with commas between them")
    return given


def check_output(output_dir: Path) -> None:
    """Refuse an output_dir in which something is in the way, before anything heavy is imported."""
    from scale_cli.storage.layout import RunFolder

    RunFolder(output_dir).check()


def quieten_libraries() -> None:
    """Silence what libraries say to each other; after a config has been found good: its errors must not wait for it."""
    warnings.simplefilter("ignore", FutureWarning)
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def show(summary: Summary | None) -> None:
    """Print what a verb returns, where this is the process that speaks."""
    for line in () if summary is None else summary.lines():
        log(line)


def log(line: str) -> None:
    """Print a line once: every process of `accelerate launch` runs the verb, one of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(printable(line))


@contextmanager
def ended_in_one_message() -> Iterator[None]:
    """Run a verb: user errors end in one message and their exit code, without a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with lost_peers_named():
            try:
                yield
            except SystemExit as ended:
                if not ended.code:
                    leave()
                raise
    except Interrupted as stopped:
        from scale_cli.training.interruption import command_to_go_on

        again = command_to_go_on(sys.argv[1:], os.environ)
        typer.echo(printable(without_passwords(f"{stopped}\ncontinue with: {again}")), err=True)
        sys.exit(stopped.exit_code)
    except EndedElsewhere as ended:
        sys.exit(ended.exit_code)
    except ScaleError as error:
        _fail(error)
    except (OSError, SafetensorError) as error:
        place = getattr(error, "filename", None) or "input/output"
        _fail(StorageError(f"{place}: {getattr(error, 'strerror', None) or error}"))
    except MemoryError:
        _fail(RunError("out of memory"))


def _stop(number: int, _frame: FrameType | None) -> None:
    """End at once, outside the training loop, which has its own way: what is half-written is never taken for whole."""
    typer.echo(
        f"stopped by {signal.Signals(number).name}; the same command starts what was not finished again", err=True
    )
    raise SystemExit(128 + number)


def _fail(error: ScaleError) -> None:
    typer.echo(f"error: {printable(without_passwords(str(error)))}", err=True)
    sys.exit(error.exit_code)
