"""What every verb has in common at the terminal: its config, what it prints, and how it ends."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import typer
from safetensors import SafetensorError
from typer.core import TyperGroup

from scale_cli import options as take
from scale_cli import progress
from scale_cli.errors import (
    ConfigError,
    EndedElsewhere,
    Interrupted,
    OutOfMemory,
    ScaleError,
    StorageError,
    UsageError,
    is_out_of_memory,
    one_line,
)
from scale_cli.printable import printable, without_passwords
from scale_cli.processes import check_launch, is_first_to_end, is_main, leave, lost_peers_named

if TYPE_CHECKING:
    from scale_cli.config.schema import RunConfig


Verb = TypeVar("Verb", bound=Callable[..., None])
_GROUPS = {
    "First": ("run", "init", "plan"),
    "One verb at a time": ("upscale", "prepare", "train", "evaluate", "export"),
    "Serving": ("generate", "serve"),
    "Research": ("sweep", "mixture", "average", "compare", "join", "verify", "schema"),
}
_output = {"json": False, "quiet": False}  # how the verb at work shows what it found


class Summary(Protocol):
    """What a verb returns, on the process that speaks."""

    def lines(self) -> list[str]:
        """Return the lines to print."""


class Verbs(TyperGroup):
    """The verbs, which the help shows in groups."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write each group with its verbs."""
        width = max(len(name) for name in self.commands) + 2
        for title, names in _GROUPS.items():
            verbs = [(name, self.commands[name]) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width - 2), verb.get_short_help_str(formatter.width - width - 4))
                        for name, verb in verbs
                    ]
                )


def reporting(verb: Verb) -> Verb:
    """Give `--json` and `--quiet` to a verb that ends with figures."""
    added = {"json": take.Json, "quiet": take.Quiet}

    @wraps(verb)
    def choose_output(**given: Any) -> Any:
        for name in added:
            _output[name] = given.pop(name)
        progress.is_shown = not any(_output.values())
        return verb(**given)

    signature = inspect.signature(verb, eval_str=True)
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=added[name]) for name in added]
    told: Any = choose_output  # typer reads off it what the verb takes
    told.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])
    told.__annotations__ = {name: option.annotation for name, option in told.__signature__.parameters.items()}
    chosen: Verb = told
    return chosen


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
    config = load_config(path, overrides or ())
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
    if summary is None:
        return
    for line in summary.lines():
        log(line)
    print_json(summary)


def log(line: str) -> None:
    """Print a line for people; where none are wanted, a warning alone, beside the figures."""
    if not any(_output.values()):
        _speak(line)
    elif line.startswith("warning:"):
        _speak(line, err=True)


def print_json(summary: object) -> None:
    """Print the figures of a summary, where `--json` asks for them."""
    if _output["json"]:
        _speak(json.dumps(_plain(summary), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it; of an object its figures, models and arrays left out."""
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        held = {str(key): _plain(of_key) for key, of_key in value.items()}
        return {key: of_key for key, of_key in held.items() if of_key is not Ellipsis}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str | int | float | None) else ...


def _speak(line: str, *, err: bool = False) -> None:
    """Print a line once: every process of `accelerate launch` runs the verb, one of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(printable(line), err=err)


@contextmanager
def ended_in_one_message() -> Iterator[None]:
    """Run a verb: user errors end in one message, of all processes one, and their exit code, without a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with lost_peers_named():
            check_launch()
            try:
                yield
            except SystemExit as ended:
                if not ended.code:
                    leave()
                raise
    except Interrupted as stopped:
        from scale_cli.training.interruption import command_to_go_on

        if is_main():  # all processes stop together
            _say(f"{stopped}\ncontinue with: {command_to_go_on(sys.argv[1:], os.environ)}")
        sys.exit(stopped.exit_code)
    except EndedElsewhere as ended:
        sys.exit(ended.exit_code)
    except ScaleError as error:
        _fail(error)
    except (OSError, SafetensorError) as error:
        place = getattr(error, "filename", None) or "input/output"
        _fail(StorageError(f"{place}: {getattr(error, 'strerror', None) or error}"))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail(OutOfMemory(f"out of memory: {one_line(error)}"))


def _stop(number: int, _frame: FrameType | None) -> None:
    """End at once, outside the training loop, which has its own way: what is half-written is never taken for whole."""
    _end(f"stopped by {signal.Signals(number).name}; the same command starts what was not finished again", 128 + number)


def _fail(error: ScaleError) -> NoReturn:
    _end(f"error: {error}", error.exit_code)


def _end(message: str, exit_code: int) -> NoReturn:
    """Say why the process ends, unless another one of the launch has said why it does."""
    if is_first_to_end():
        _say(message)
    sys.exit(exit_code)


def _say(message: str) -> None:
    typer.echo(printable(without_passwords(message)), err=True)
