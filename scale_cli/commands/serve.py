"""The verb `scale serve`: which server serves a plain export, and what it keeps of the promise."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import socket
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scale_cli.data.tokens import prompt_ids
from scale_cli.errors import MissingExtraError, UsageError
from scale_cli.evaluation.guarantee import bound_nats
from scale_cli.export.plain_folder import find_plain_export, is_framed, load_exported_tokenizer
from scale_cli.export.router_keys import KEY, routed_name
from scale_cli.extras import is_installed, require
from scale_cli.storage.atomic import read_json

Engine = Literal["vllm", "transformers"]
# Not vLLM's command line: in the build for processors, a package of another name, it does not find itself.
_VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


@dataclass(frozen=True)
class Serving:
    """What a server promises and how it is asked, and what starts it."""

    lines: list[str]
    start: Callable[[], None]


def serving(path: Path, engine: Engine | None, options: Sequence[str], *, plainly: bool) -> Serving:
    """Return how a folder is served."""
    folder = find_plain_export(path)
    config = read_json(folder / "config.json")
    chosen: Engine = engine or ("vllm" if is_installed("vllm") else "transformers")
    if KEY not in config and not plainly:
        raise UsageError(
            f"{folder}: its config.json has no {KEY}: it cannot be served routed; --plain serves what it holds"
        )
    promise = _promise(folder, config, chosen, plainly=plainly)
    if chosen == "vllm":
        return _by_vllm(folder, config, options, promise, plainly=plainly)
    return _by_transformers(folder, options, promise, plainly=plainly)


def _promise(folder: Path, config: dict[str, Any], engine: Engine, *, plainly: bool) -> str:
    if plainly:
        of = "the trained head alone, without what a router keeps" if KEY in config else "it has no router"
        return f"serving        {folder}, plainly, in {engine}: {of}"
    message = f"serving        {folder}, with its router, in {engine}: what the trained model says, to rounding"
    return f"{message}{_bound(config[KEY])}"


def _by_vllm(folder: Path, config: dict[str, Any], options: Sequence[str], promise: str, *, plainly: bool) -> Serving:
    """Return vLLM's own server, told the class that routes."""
    if not is_installed("vllm"):
        raise MissingExtraError(
            "--engine vllm: needs vllm: pip install 'scale-cli[vllm]', in an environment of its own"
        )
    architectures = json.dumps({"architectures": [routed_name(config["architectures"][0])]})
    flags = [] if plainly else ["--hf-overrides", architectures]
    command = [*_VLLM, str(folder), *flags, *options]
    lines = [promise, *_unframed(folder), *_how_to_ask(_address(folder, options)[0])]
    # vLLM reports how it is used, unless it is told not to.
    return Serving(lines, lambda: os.execve(command[0], command, {"VLLM_NO_USAGE_STATS": "1", **os.environ}))


def _by_transformers(folder: Path, options: Sequence[str], promise: str, *, plainly: bool) -> Serving:
    """Return this package's own server."""
    for module in ("fastapi", "uvicorn"):
        require(module, "--engine transformers")
    address, others = _address(folder, options)
    if others:
        raise UsageError(
            f"{others[0]}: the engine transformers takes --host, --port and --served-model-name; vLLM takes more"
        )
    _check_port(address.host, address.port)

    def start() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # a server that was stopped has left nothing unfinished
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        from scale_cli.generation.generator import Generator
        from scale_cli.generation.server import run_server

        run_server(Generator(folder, plainly=plainly), address.name, address.host, address.port)

    return Serving([promise, *_how_to_ask(address)], start)


def _address(folder: Path, options: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return where a server will listen and under which name, and the options that say nothing of that."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", dest="name", default=str(folder))
    try:
        return parser.parse_known_args(list(options))
    except ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None


def _check_port(host: str, port: int) -> None:
    """Refuse a port that is not to be had, before anything is announced."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}, --port {port}: {error.strerror}") from None
    for family, _, _, _, place in places:
        try:
            socket.create_server(place, family=family).close()
        except OSError as error:  # of a host's addresses not all need be here
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                said = os.strerror(error.errno).lower()
                raise UsageError(f"port {port} of {host}: {said}; take another: -- --port {port + 1}") from None


def _how_to_ask(address: Namespace) -> list[str]:
    """Return the served model's name, and a command that asks it."""
    host = "localhost" if address.host in ("0.0.0.0", "::") else address.host
    body = json.dumps({"model": address.name, "prompt": "Once upon a time", "max_tokens": 16}, ensure_ascii=False)
    url = f"http://{host}:{address.port}/v1/completions"
    return [
        f"model          {address.name}",
        f"ask            curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]


def _unframed(folder: Path) -> list[str]:
    """Return a warning where the engine, which reads the folder's tokenizer, would begin a prompt otherwise."""
    tokenizer = load_exported_tokenizer(folder)
    if is_framed(tokenizer, tokenizer):
        return []
    boundary = tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, "a"))[0]
    return [
        f"warning        prompts begin without {boundary}, which stood before every document in training: export the "
        "run again, or begin each prompt with it"
    ]


def _bound(router: dict[str, Any]) -> str:
    """Return by how much routing may cost a whole document more than its best head, in words."""
    smallest = min(router["prior"], (1.0 - router["prior"]) / len(router["parents"]))
    nats = bound_nats(smallest, router["switch_rate"])
    return "" if nats is None else f"; no document costs more than {nats:.3f} nats over its best head"
