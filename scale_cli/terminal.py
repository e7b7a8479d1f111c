"""Printing: lines for people or figures as JSON, progress bars, text made safe to print."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import typer
from tqdm import tqdm

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PASSWORD = re.compile(r"://[^/@\s]*@")
_SECONDS_APART = 30.0  # between the lines that replace a bar in a log; shorter work prints none
_MANY_BYTES = 1 << 27  # to hash fewer takes no second
_SHORT_S = 1.0  # what takes no longer shows no bar of bytes
Log = Callable[[str], None]
_form: Literal["lines", "figures", "nothing"] = (
    "lines"  # of standard output; bars appear only with lines
)


class Shown(Protocol):
    """A verb's result, which can be printed."""

    def lines(self) -> list[str]: ...

    def to_json(self) -> dict[str, Any]: ...


def choose_form(as_json: bool | None) -> None:
    """Choose what is printed: figures (True), nothing (False), or lines for people (None)."""
    global _form
    _form = "lines" if as_json is None else "figures" if as_json else "nothing"


def shows_lines() -> bool:
    """Return whether this process shows lines and bars: of a launch's processes, rank 0 alone."""
    return _form == "lines" and os.environ.get("RANK", "0") == "0"


def log(line: str) -> None:
    """Print a line for people; if none are wanted, print only warnings, on standard error."""
    if shows_lines() or line.startswith("warning:"):
        _speak(line, err=not shows_lines())


def show(made: Shown) -> None:
    for line in made.lines():
        log(line)
    print_json(made.to_json())


def print_json(figures: object) -> None:
    """Print figures as JSON, if they were asked for."""
    if _form == "figures":
        from pydantic_core import to_json

        _speak(to_json(figures, inf_nan_mode="null").decode())


def _speak(line: str, *, err: bool = False) -> None:
    """Print a line once: every process of a launch runs the verb, but only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(printable(line), err=err)


def printable(text: str) -> str:
    """Return a text with its control characters escaped: a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def accept_any_encoding() -> None:
    """Escape what the terminal's encoding lacks, and let undecodable input reach the verb."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def without_passwords(text: str) -> str:
    """Return a text without the user names and passwords of its URLs."""
    return _PASSWORD.sub("://***@", text)


class _Lines:
    """Writes every state of a bar to standard error as a line of its own."""

    def write(self, text: str) -> None:
        if state := text.replace("\x1b[A", "").strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def not_counted(bar: Any) -> Iterator[None]:
    """Stop a bar's clock: the body moves neither its speed, nor its elapsed time, nor what is left.

    Lines that are printed meanwhile draw the bar again, so its clock must stand still at once.
    """
    if bar.disable:
        yield
        return
    clock = bar._time
    stopped_s = clock()
    bar._time = lambda: stopped_s
    try:
        yield
    finally:
        bar._time = clock
        passed_s = clock() - stopped_s
        bar.start_t += passed_s
        bar.last_print_t += passed_s


def progress_bar(**options: Any) -> Any:
    """Return a tqdm bar.

    If standard error is not a terminal, plain lines now and then replace it.
    """
    options["disable"] = not shows_lines() or options.get("disable", False)
    if sys.stderr.isatty():
        return tqdm(**options)
    apart: dict[str, Any] = dict.fromkeys(("delay", "mininterval", "maxinterval"), _SECONDS_APART)
    return tqdm(**{**options, **apart}, file=_Lines())


@contextmanager
def bytes_bar(label: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yield what moves a bar over bytes that are read, if they are many.

    A thread shows none: it writes a checkpoint, beside the bar of the steps.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    if num_bytes < _MANY_BYTES or in_thread:
        yield lambda _num_bytes: None
        return
    with progress_bar(
        total=num_bytes, desc=label, unit="B", unit_scale=True, delay=_SHORT_S, leave=False
    ) as bar:
        yield bar.update
