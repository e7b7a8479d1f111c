"""Progress bars of tqdm, and where standard error is no terminal a plain line now and then in their place."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

_SECONDS_APART = 30.0  # of the lines in a log; what takes less long has none
is_shown = True  # what `--quiet` and `--json` turn off


class _Lines:
    """Standard error, with every state of a bar on a line of its own, and nothing that moves a cursor."""

    def write(self, text: str) -> None:
        if state := text.replace("\x1b[A", "").strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(**options: Any) -> Any:
    """Return a bar with tqdm's options."""
    options["disable"] = not is_shown or options.get("disable", False)
    if sys.stderr.isatty():
        return tqdm(**options)
    apart: dict[str, Any] = dict.fromkeys(("delay", "mininterval", "maxinterval"), _SECONDS_APART)
    return tqdm(**options, **apart, file=_Lines())
