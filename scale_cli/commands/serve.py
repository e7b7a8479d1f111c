"""The verb `scale serve`: which engine serves a plain export, with which flags, and what it keeps of the promise."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scale_cli.errors import MissingExtraError, UsageError
from scale_cli.evaluation.guarantee import bound_nats
from scale_cli.export.plain_folder import find_plain_export
from scale_cli.export.router_keys import KEY, carries_our_code, routed_name
from scale_cli.extras import is_installed, require
from scale_cli.storage.atomic import read_json

Engine = Literal["vllm", "transformers"]
# Not vLLM's command line: in the build for processors, a package of another name, it does not find itself.
_SERVERS = {
    "vllm": ["vllm.entrypoints.openai.api_server", "--model"],
    "transformers": ["transformers.cli.transformers", "serve"],
}


@dataclass(frozen=True)
class Serving:
    """What is to be run, and what it promises."""

    command: list[str]  # an engine's own server
    promise: str  # one line


def serving(path: Path, engine: Engine | None, options: Sequence[str], *, plainly: bool) -> Serving:
    """Return how a folder is served."""
    folder = find_plain_export(path)
    config = read_json(folder / "config.json")
    chosen: Engine = engine or ("vllm" if is_installed("vllm") else "transformers")
    _check_engine(chosen)
    if plainly:
        of = "the trained head alone, without what a router keeps" if KEY in config else "it has no router"
        return Serving(_command(chosen, folder, options), f"{folder}, plainly, in {chosen}: {of}")
    if KEY not in config:
        raise UsageError(
            f"{folder}: its config.json has no {KEY}: it cannot be served routed; --plain serves what it holds"
        )
    if chosen == "vllm":
        architectures = json.dumps({"architectures": [routed_name(config["architectures"][0])]})
        flags = ["--hf-overrides", architectures]
    else:
        _check_for_transformers(folder, options)
        flags = ["--trust-remote-code"]
    message = f"{folder}, with its router, in {chosen}: what the trained model says, to rounding"
    return Serving(_command(chosen, folder, [*flags, *options]), f"{message}{_bound(config[KEY])}")


def _check_engine(engine: Engine) -> None:
    if engine == "vllm" and not is_installed("vllm"):
        raise MissingExtraError(
            "--engine vllm: needs vllm: pip install 'scale-cli[vllm]', in an environment of its own"
        )
    if engine == "transformers":
        for module in ("openai", "fastapi", "uvicorn"):
            require(module, "--engine transformers")


def _check_for_transformers(folder: Path, options: Sequence[str]) -> None:
    if any(option.startswith("--continuous-batching") for option in options):
        raise UsageError(
            "--continuous-batching: its cache does not hold the router's memory; leave it out, or take --engine vllm"
        )
    if not carries_our_code(folder):
        raise UsageError(
            f"{folder}: the code beside its weights is not this version's: export it again, or, if you have read it, "
            f"`transformers serve {folder} --trust-remote-code`"
        )


def _command(engine: Engine, folder: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *_SERVERS[engine], str(folder), *options]


def _bound(router: dict[str, Any]) -> str:
    """Return by how much routing may cost a whole document more than its best head, in words."""
    smallest = min(router["prior"], (1.0 - router["prior"]) / len(router["parents"]))
    nats = bound_nats(smallest, router["switch_rate"])
    return "" if nats is None else f"; no document costs more than {nats:.3f} nats over its best head"
