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
from scale_cli.generation.generator import Generator
from scale_cli.model.configuration_scale import JoinedConfig
from scale_cli.model.script_prior import PriorByScript
from scale_cli.serving import FAMILIES
from scale_cli.storage.atomic import read_json
from scale_cli.terminal import Log

Engine = Literal["vllm", "transformers"]
# Not the command `vllm`: in the CPU build, a package of another name, it does not find its own
# package.
_VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def serve(
    path: Path,
    engine: Engine | None,
    options: Sequence[str],
    log: Log,
    *,
    plainly: bool = False,
    beside_base: bool = False,
) -> None:
    """Log what the server guarantees and an example request, then become the server.

    With `beside_base`, a run's trained model and its base are two models in memory.
    """
    folder = path if beside_base else find_plain_export(path)
    config = {} if beside_base else read_json(folder / "config.json")
    if not beside_base:
        engine = _engine_of(folder, config, engine, plainly=plainly)
    address, others = _address(folder, options)
    if engine == "vllm":
        architectures = json.dumps({"architectures": [routed_name(config["architectures"][0])]})
        routed = [] if plainly else ["--hf-overrides", architectures]
        prior = None if plainly else PriorByScript.of_export(config[KEY])
        _announce(folder, "vllm", address, log, config=config, prior=prior)
        command = [*_VLLM, str(folder), *routed, *options]
        # vLLM sends usage statistics unless told not to. Its runner V2 tells no prompt to a plug-in.
        routed_only = {} if plainly else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ, **routed_only}
        os.execve(command[0], command, environment)

    _check_server(address, others)
    for number in (signal.SIGINT, signal.SIGTERM):  # stopping a server leaves nothing unfinished
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    from scale_cli.generation.server import run_server

    generator = Generator(folder, plainly=plainly, beside_base=beside_base)
    names = generator.head_names
    _announce(
        folder,
        "transformers",
        address,
        log,
        config=config,
        prior=generator.prior if names else None,
        num_heads=len(names),
        rule=getattr(generator.model.config, "router_rule", "posterior"),
    )
    run_server(generator, address.name, address.host, address.port)


def _engine_of(
    folder: Path, config: dict[str, Any], engine: Engine | None, *, plainly: bool
) -> Engine:
    """Return the engine that serves a folder.

    UsageError if none can, or not the given one.
    """
    if config.get("model_type") == JoinedConfig.model_type:
        if plainly or engine == "vllm":
            raise UsageError(
                f"{folder}: a join is served routed and in transformers; "
                "remove --plain and --engine vllm"
            )
        return "transformers"
    if not config.get("architectures"):
        raise UsageError(
            f"{folder}: not a plain export; give the run, "
            "or what `scale export` wrote in format llama"
        )
    architecture = config["architectures"][0]
    has_vllm = plainly or architecture in {f"{family}ForCausalLM" for family in FAMILIES}
    chosen: Engine = engine or ("vllm" if is_installed("vllm") and has_vllm else "transformers")
    if not config.get(KEY) and not plainly:
        raise UsageError(
            f"{folder}: config.json has no {KEY}, so this model cannot be served with a router; "
            "add --plain"
        )
    if chosen == "vllm" and not has_vllm:
        raise UsageError(
            f"--engine vllm: only transformers can route {architecture}; "
            "remove --engine vllm, or add --plain"
        )
    if chosen == "vllm" and not is_installed("vllm"):
        raise MissingExtraError(
            "--engine vllm: needs vllm: pip install 'scale-cli[vllm]', in an environment of its own"
        )
    return chosen


def _announce(
    folder: Path,
    engine: Engine,
    address: Namespace,
    log: Log,
    *,
    config: dict[str, Any],  # of the folder; empty for a run beside its base
    prior: PriorByScript | None,  # None: without a router
    num_heads: int = 2,
    rule: str = "posterior",
) -> None:
    """Log what the server guarantees, the model's name, and a command that asks it."""
    if prior is None:
        how = "without a router"
        what = "the model has none"
        if config.get(KEY):
            what = "the trained head alone; only with its router it keeps what the base knew"
    else:
        smallest = min(prior.otherwise, (1.0 - prior.otherwise) / (num_heads - 1))
        what = f"no document costs more than {-math.log(smallest):.3f} nats over its best head"
        if prior.ranges and prior.in_script is not None and prior.in_script < smallest:
            what += (
                f", or {-math.log(prior.in_script):.3f} where the prompt's script speaks for the "
                f"other head (method.router.script_prior {prior.in_script:g})"
            )
        how = "with its router" if config else "routed with its base"
        if rule == "cosine":
            what = "the cosine rule promises no bound"
        if config:
            what = f"the trained model's answers, up to rounding; {what}"
    log(f"serving        {folder}, {how}, in {engine}: {what}")
    log(f"model          {address.name}")

    host = "localhost" if address.host in ("0.0.0.0", "::") else address.host
    body = {"model": address.name, "prompt": "Once upon a time", "max_tokens": 16}
    url = f"http://{host}:{address.port}/v1/completions"
    asked = shlex.quote(json.dumps(body, ensure_ascii=False))
    log(f"ask            curl {url} -H 'Content-Type: application/json' -d {asked}")
    sys.stdout.flush()


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
    """Raise an error if the server of transformers cannot run, before anything is loaded."""
    for module in ("fastapi", "uvicorn"):
        require(module, "--engine transformers")
    if others:
        raise UsageError(
            f"{others[0]}: the engine transformers takes only --host, --port and "
            "--served-model-name; remove it, or use --engine vllm"
        )
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        socket.create_server((address.host, address.port), family=family).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--host {address.host}, --port {address.port}: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
