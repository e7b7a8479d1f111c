"""What is printed: lines for people or figures as JSON, progress bars, and other people's text made safe to print."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import typer
from tqdm import tqdm

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PASSWORD = re.compile(r"://[^/@\s]*@")
_SECONDS_APART = 30.0  # of the lines that stand for a bar in a log; what takes less long has none
_form: Literal["lines", "figures", "nothing"] = "lines"  # of standard output; bars are shown beside lines alone


class Summary(Protocol):
    """What a verb returns, on the process that speaks."""

    def lines(self) -> list[str]:
        """Return the lines to print."""


def choose_form(as_json: bool | None) -> None:
    """Choose what the verb at work prints: figures alone, nothing (False), or lines for people (None)."""
    global _form
    _form = "lines" if as_json is None else "figures" if as_json else "nothing"


def shows_lines() -> bool:
    return _form == "lines"


def show(summary: Summary | None) -> None:
    """Print what a verb returns, where this is the process that speaks."""
    if summary is not None:
        for line in summary.lines():
            log(line)
        print_json(summary)


def log(line: str) -> None:
    """Print a line for people; where none are wanted, a warning alone, on standard error."""
    if shows_lines() or line.startswith("warning:"):
        _speak(line, err=not shows_lines())


def print_json(summary: object) -> None:
    """Print the figures of a summary, where they are asked for."""
    if _form == "figures":
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


def printable(text: str) -> str:
    """Return a text with its control characters spelled out: a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_passwords(text: str) -> str:
    """Return a text without what stands before the host of a URL."""
    return _PASSWORD.sub("://***@", text)


class _Lines:
    """Standard error, with every state of a bar on a line of its own, and nothing that moves a cursor."""

    def write(self, text: str) -> None:
        if state := text.replace("\x1b[A", "").strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(**options: Any) -> Any:
    """Return a bar with tqdm's options; where standard error is no terminal, a plain line now and then in its place."""
    options["disable"] = not shows_lines() or options.get("disable", False)
    if sys.stderr.isatty():
        return tqdm(**options)
    apart: dict[str, Any] = dict.fromkeys(("delay", "mininterval", "maxinterval"), _SECONDS_APART)
    return tqdm(**options, **apart, file=_Lines())
