"""The verb `scale serve`: choose a server for a plain export, and say what it guarantees."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from scale_cli.errors import MissingExtraError, UsageError, is_installed, require
from scale_cli.export.plain_folder import KEY, find_plain_export, routed_name
from scale_cli.serving import FAMILIES
from scale_cli.storage.atomic import read_json
from scale_cli.terminal import Log

Engine = Literal["vllm", "transformers"]
# Not the command `vllm`: in the CPU build, a package of another name, it does not find its own package.
_VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def serve(
    path: Path, engine: Engine | None, options: Sequence[str], log: Log, *, plainly: bool
) -> None:
    """Log what the server guarantees and an example request, then become the server."""
    folder = find_plain_export(path)
    config = read_json(folder / "config.json")
    if not config.get("architectures"):
        raise UsageError(
            f"{folder}: not a plain export; give the run, or what `scale export` wrote in format llama"
        )
    architecture = config["architectures"][0]
    has_vllm = plainly or architecture in {f"{family}ForCausalLM" for family in FAMILIES}
    chosen: Engine = engine or ("vllm" if is_installed("vllm") and has_vllm else "transformers")
    if not config.get(KEY) and not plainly:
        raise UsageError(
            f"{folder}: config.json has no {KEY}, so this model cannot be served with a router; add --plain"
        )
    if chosen == "vllm" and not has_vllm:
        raise UsageError(
            f"--engine vllm: only transformers can route {architecture}; remove --engine vllm, or add --plain"
        )
    address, others = _address(folder, options)
    if chosen == "vllm":
        if not is_installed("vllm"):
            raise MissingExtraError(
                "--engine vllm: needs vllm: pip install 'scale-cli[vllm]', in an environment of its own"
            )
    else:
        _check_server(address, others)
    log(_promise(folder, config, chosen, plainly=plainly))
    _announce(address, log)
    if chosen == "vllm":
        architectures = json.dumps({"architectures": [routed_name(architecture)]})
        command = [
            *_VLLM,
            str(folder),
            *([] if plainly else ["--hf-overrides", architectures]),
            *options,
        ]
        # vLLM sends usage statistics unless told not to.
        os.execve(command[0], command, {"VLLM_NO_USAGE_STATS": "1", **os.environ})
    _stop_on_signals()
    from scale_cli.generation.generator import Generator
    from scale_cli.generation.server import run_server

    run_server(Generator(folder, plainly=plainly), address.name, address.host, address.port)


def serve_beside_base(path: Path, options: Sequence[str], log: Log) -> None:
    """Serve a run's trained model, routed with its base, in transformers: both lie in memory."""
    address, others = _address(path, options)
    _check_server(address, others)
    _stop_on_signals()
    from scale_cli.generation.generator import Generator
    from scale_cli.generation.server import run_server

    generator = Generator(path, beside_base=True)
    prior = generator.prior
    bound = _bound(min(prior.otherwise, 1.0 - prior.otherwise), prior.in_script)
    log(f"serving        {path}, routed with its base, in transformers: {bound}")
    _announce(address, log)
    run_server(generator, address.name, address.host, address.port)


def _stop_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # stopping a server leaves nothing unfinished
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _announce(address: Namespace, log: Log) -> None:
    log(f"model          {address.name}")
    log(f"ask            {_example(address)}")
    sys.stdout.flush()


def _promise(folder: Path, config: dict[str, Any], engine: Engine, *, plainly: bool) -> str:
    if plainly:
        of = (
            "the trained head alone; only with its router it keeps what the base knew"
            if config.get(KEY)
            else "the model has none"
        )
        return f"serving        {folder}, without a router, in {engine}: {of}"
    router = config[KEY]
    smallest = min(router["prior"], (1.0 - router["prior"]) / (len(router["stream_sizes"]) - 1))
    by_script = router.get("script_prior") if engine == "transformers" else None
    return (
        f"serving        {folder}, with its router, in {engine}: the trained model's answers, up to rounding; "
        f"{_bound(smallest, by_script)}"
    )


def _bound(smallest: float, by_script: float | None) -> str:
    """Return what the router promises, by the smallest prior of a head."""
    told = f"no document costs more than {-math.log(smallest):.3f} nats over its best head"
    if by_script is None or by_script >= smallest:
        return told
    return (
        f"{told}, or {-math.log(by_script):.3f} where the prompt's script speaks for the other head "
        f"(method.router.script_prior {by_script:g})"
    )


def _address(folder: Path, options: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the host, port and model name of a server, and the remaining options."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", dest="name", default=str(folder))
    try:
        return parser.parse_known_args(list(options))
    except ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None


def _check_server(address: Namespace, others: Sequence[str]) -> None:
    """Raise an error if the server of transformers cannot run, before anything is announced."""
    for module in ("fastapi", "uvicorn"):
        require(module, "--engine transformers")
    if others:
        raise UsageError(
            f"{others[0]}: the engine transformers takes only --host, --port and --served-model-name; remove it, "
            "or use --engine vllm"
        )
    _check_port(address.host, address.port)


def _check_port(host: str, port: int) -> None:
    """Raise UsageError if a port is not available, before anything is announced."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--host {host}, --port {port}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _example(address: Namespace) -> str:
    """Return a command that asks the server."""
    host = "localhost" if address.host in ("0.0.0.0", "::") else address.host
    body = json.dumps(
        {"model": address.name, "prompt": "Once upon a time", "max_tokens": 16}, ensure_ascii=False
    )
    url = f"http://{host}:{address.port}/v1/completions"
    return f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
