"""Says what the command line has imported after each of these steps; to be run in a fresh process.

Every verb's help; every verb with a config that is not there; then the imports inside the verbs, one after another.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import sys
from typing import Any

from typer.main import get_command_name

from scale_cli.cli import app
from scale_cli.errors import ConfigError

VERBS: dict[str, Any] = {
    get_command_name(command.name or command.callback.__name__): command.callback
    for command in app.registered_commands
    if command.callback is not None
}
# What one leaves out can be seen only until another has brought it: the one that needs no model goes first.
ORDER = sorted(VERBS, key=lambda verb: verb != "compare")


def main() -> None:
    """Print one JSON object: the names in sys.modules after each step."""
    after: dict[str, list[str]] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for arguments in ([], *([verb] for verb in VERBS)):
            app([*arguments, "--help"], standalone_mode=False)
        after["help"] = sorted(sys.modules)
        for verb in VERBS:
            if "config" in inspect.signature(VERBS[verb]).parameters:
                with contextlib.suppress(ConfigError):
                    app([verb, "/absent.yaml"], standalone_mode=False)
                    raise AssertionError(f"{verb} takes a config that is not there")
        after["a bad config"] = sorted(sys.modules)
    for verb in ORDER:
        _import_as(verb)
        after[verb] = sorted(sys.modules)
    json.dump(after, sys.stdout)


def _import_as(verb: str) -> None:
    """Import what a verb imports when it is called."""
    for node in ast.walk(ast.parse(inspect.getsource(VERBS[verb]))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


if __name__ == "__main__":
    main()
