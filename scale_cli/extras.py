"""Libraries that only some verbs need: which extra of this package brings each, and what to say without it."""

from __future__ import annotations

from importlib.util import find_spec

from scale_cli.errors import MissingExtraError

EXTRA_OF = {"lm_eval": "eval", "peft": "lora", "matplotlib": "report", "tensorboard": "track"}
EXTRA_OF |= dict.fromkeys(("fastapi", "uvicorn"), "serve")


def is_installed(module: str) -> bool:
    """Return whether a library is there, without importing it."""
    return find_spec(module) is not None


def how_to_install(module: str) -> str:
    """Return the command that installs what brings a library; one of no extra is asked for by its own name."""
    return f"pip install 'scale-cli[{EXTRA_OF[module]}]'" if module in EXTRA_OF else f"pip install {module}"


def require(module: str, needed_by: str) -> None:
    """Refuse to begin what cannot be ended without a library.

    Args:
        module: by its import name.
        needed_by: the key of the config, or the verb.
    """
    if not is_installed(module):
        raise MissingExtraError(f"{needed_by}: needs {module.replace('_', '-')}: {how_to_install(module)}")
