"""The verb `scale serve`: choose a server for a run or an export, and say what it guarantees."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from scale_cli.config.load import load_config
from scale_cli.config.schema import Head
from scale_cli.errors import MissingExtraError, RunFolderError, UsageError, is_installed, require
from scale_cli.export.served_folder import exports, holds_base, routed_name
from scale_cli.methods.given import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from scale_cli.methods.stream_kinds import ADAPTER, ROUTER
from scale_cli.model.script_prior import PriorByScript
from scale_cli.serving import FAMILIES
from scale_cli.storage.atomic import read_json
from scale_cli.terminal import log
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.router_keys import router_keys_of

Engine = Literal["vllm", "transformers"]
_HEADS = {"embed_tokens", "lm_head"}
# Tensors of A and B beside a linear layer, and of a module instead of the base's.
_BESIDE = re.compile(r"\.(?P<module>\w+)\.lora_[AB]\.weight")
_INSTEAD = re.compile(rf"\.({'|'.join(sorted(_HEADS))})(\.modules_to_save)?\.weight")
# Not the command `vllm`: in the CPU build, a package of another name, it does not find its own
# package.
_VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def serve(
    path: Path,
    engine: Engine | None,
    options: Sequence[str],
    head: Head | None = None,
    base: str | None = None,
) -> None:
    """Log what the server guarantees and an example request, then become the server.

    `base` is that of a model that others trained, which `path` is then.
    """
    folder, config = (path, {}) if base else _find_served(path, head)
    engine = _engine_of(folder, config, engine, head)
    address, others = _address(folder, options)
    if engine == "vllm":
        routed: list[str] = []
        prior = None
        # vLLM sends usage statistics unless told not to.
        environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ}
        if head != "trained" and _routes_in_vllm(folder, config):
            architectures = json.dumps({"architectures": [routed_name(config["architectures"][0])]})
            routed = ["--hf-overrides", architectures]
            prior = PriorByScript.of_export(config[ROUTER])
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # that tells no prompt to a plug-in
        _announce(folder, "vllm", address, head=head, config=config, prior=prior)
        command = [*_VLLM, str(folder), *routed, *options]
        os.execve(command[0], command, environment)

    _check_server(address, others)
    for number in (signal.SIGINT, signal.SIGTERM):  # stopping a server leaves nothing unfinished
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    from scale_cli.generation.generator import Generator
    from scale_cli.generation.server import run_server

    generator = Generator(folder, head, base)
    _announce(
        folder,
        "transformers",
        address,
        head=head,
        config=config,
        prior=generator.prior,
        rule=getattr(generator.model, "head", "posterior"),
    )
    run_server(generator, address.name, address.host, address.port)


def _find_served(path: Path, head: Head | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder that answers, and its config.json if vLLM can answer from that folder.

    Of a run, that is its export, if that can answer with this head, else the run.
    """
    is_adapter = (path / ADAPTER_CONFIG).is_file()
    if is_adapter or (path / "config.json").is_file():
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if is_adapter:
            is_routed = head in (None, "routed") and _routes_in_vllm(path, config)
            return path, config if is_routed else {}
        is_whole = "base_config" not in config and not BaseRecord.is_in(path)
        return path, config if is_whole else {}
    found = {folder: read_json(folder / "config.json") for folder in exports(path)}
    final = path / "final" / "scale.yaml"
    asked = head or (load_config(final).method.head if final.is_file() else "routed")
    fitting = [
        folder
        for folder, config in found.items()
        if (asked == "routed" and _routes_in_vllm(folder, config))
        or (asked == "trained" and not (folder / ADAPTER_CONFIG).is_file())
    ]
    if len(fitting) > 1:
        named = ", ".join(map(str, fitting))
        raise UsageError(f"{path}: has several exports; give one of them: {named}")
    if fitting:
        return fitting[0], found[fitting[0]]
    if not final.is_file():
        raise RunFolderError(f"{path}: contains neither a trained model (final/) nor an export")
    return path, {}


def _routes_in_vllm(folder: Path, config: dict[str, Any]) -> bool:
    """Return whether an export's config.json says how to route it, as vLLM can.

    Of adapters those can that are A and B of linear layers, and an embedding or a head of their own.
    """
    keys = router_keys_of(str(folder), config)
    if keys is None or keys.kind != ADAPTER.name:
        return keys is not None or holds_base(config)
    weights = folder / ADAPTER_WEIGHTS
    of_no_layer = read_json(folder / ADAPTER_CONFIG).get("target_parameters")
    if of_no_layer or not weights.is_file():
        return False
    with safe_open(weights, framework="numpy") as tensors:
        names = list(tensors.keys())
    beside = [_BESIDE.search(name) for name in names]
    return all(
        found["module"] not in _HEADS if found else _INSTEAD.search(name)
        for name, found in zip(names, beside, strict=True)
    )


def _engine_of(
    folder: Path, config: dict[str, Any], engine: Engine | None, head: Head | None
) -> Engine:
    """Return the engine that serves a folder.

    UsageError if none can, or not the given one.
    """
    if not config.get("architectures"):
        if engine != "vllm":
            return "transformers"
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            raise UsageError(
                f"--engine vllm: serves the export of an adapter, which names its base; make one with "
                f"`scale evaluate {shlex.quote(str(folder))} --corpus TEXT ... --output RUN` and `scale export RUN`"
            )
        raise UsageError(
            "--engine vllm: serves plain exports (format plain), and routed ones of LoRA beside "
            "linear layers, whose embedding and head are the base's or whole; "
            f"{folder} is none; remove --engine vllm"
        )
    architecture = config["architectures"][0]
    is_routed = _routes_in_vllm(folder, config) and head != "trained"
    if head == "routed" and not is_routed:
        raise UsageError(
            f"{folder}: config.json has no {ROUTER}, so this folder alone cannot be routed; "
            "give its run, or --head trained"
        )
    has_vllm = head != "base" and (
        not is_routed or architecture in {f"{family}ForCausalLM" for family in FAMILIES}
    )
    chosen: Engine = engine or ("vllm" if is_installed("vllm") and has_vllm else "transformers")
    if chosen == "vllm" and not has_vllm:
        other = ", or add --head trained" if is_installed("vllm") else ""
        raise UsageError(
            f"--engine vllm: only transformers can route {architecture}; "
            f"remove --engine vllm{other}"
        )
    if chosen == "vllm" and not is_installed("vllm"):
        raise MissingExtraError(
            "--engine vllm: needs vLLM, in an environment of its own: pip install vllm, and then "
            "pip install --no-deps scale-cli"
        )
    return chosen


def _announce(
    folder: Path,
    engine: Engine,
    address: Namespace,
    *,
    head: Head | None,
    config: dict[str, Any],  # of an export that vLLM serves; else empty
    prior: PriorByScript | None,  # None: without a router
    rule: str = "posterior",
) -> None:
    """Log what the server guarantees, the model's name, and a command that asks it."""
    if prior is None:
        how = "without a router"
        what = "the trained head alone; only with its router it keeps what the base knew"
        if head == "base":
            what = "the base alone"
        elif head is None and config:
            what = "the model has none"
    else:
        smallest = min(prior.otherwise, 1.0 - prior.otherwise)
        what = f"no document costs more than {-math.log(smallest):.3f} nats over its best head"
        if prior.ranges and prior.in_script is not None and prior.in_script < smallest:
            what += (
                f", or {-math.log(prior.in_script):.3f} where the prompt's script speaks for the "
                f"other head (method.router.script_prior {prior.in_script:g})"
            )
        how = "with its router" if holds_base(config) else "routed with its base"
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
        flags = ("--host", "--port", "--served-model-name")
        meant = get_close_matches(others[0].partition("=")[0], flags, n=1)
        raise UsageError(
            f"{others[0]}: the engine transformers takes only {', '.join(flags)}; "
            f"{f'did you mean {meant[0]}?' if meant else 'remove it'}"
        )
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        socket.create_server((address.host, address.port), family=family).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--host {address.host}, --port {address.port}: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
