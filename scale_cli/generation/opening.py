"""Opens what can generate."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import typer
from transformers import AutoModelForCausalLM

from scale_cli.config.schema import Head, ModelConfig
from scale_cli.errors import RunFolderError
from scale_cli.export.plain_folder import routed_class
from scale_cli.methods.stream_kinds import ROUTER
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.script_prior import PriorByScript
from scale_cli.model.two_streams import Router, TwoStreams
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import router_of, set_router
from scale_cli.runs.opened import MethodFolder, open_folder
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.upscale.given_model import (
    GivenModel,
    given_model,
    load_given,
    other_base,
    tokenizer_of_given,
)


class Opened(NamedTuple):
    """What answers, in evaluation mode."""

    model: Any
    tokenizer: Any
    prior: PriorByScript | None = None  # of the base, where it is mixed; None: one head answers


def open_model(source: Path | ModelConfig, head: Head | None, base: str | None) -> Opened:
    """Open what answers; the arguments are those of `Generator`."""
    if isinstance(source, ModelConfig):
        return Opened(move_to_device(load_base(source)), load_tokenizer(source))
    if given := given_model(source, base):
        return _open_given(given, head)
    run = RunFolder(source)
    folder = run.final if run.final.is_dir() else source
    if not (folder / "config.json").is_file():
        if begun := run.saved:
            raise RunFolderError(
                f"{source}: has not ended, so it has no final/; generate with its newest "
                f"checkpoint: scale generate {shlex.quote(str(begun[-1]))}"
            )
        raise RunFolderError(
            f"{source}: contains no model; give a run with a final/, a checkpoint or an export"
        )
    if BaseRecord.is_in(folder):
        return _open_on_base(open_folder(folder), head)
    return _open_whole(folder, head)


def _open_on_base(opened: MethodFolder, head: Head | None) -> Opened:
    """Open what a method folder and its base answer with."""
    config = opened.run.config
    head = head or config.method.head
    if head == "base":
        return Opened(move_to_device(opened.load_base()), opened.run.base_tokenizer)
    if head == "trained":
        model: Any = opened.load()
        set_router(model, None)
        return Opened(model, opened.tokenizer)
    router = router_of(config)
    model = TwoStreams(opened.load_streams(), router).eval()
    return Opened(model, opened.tokenizer, router.prior)


def _open_given(given: GivenModel, head: Head | None) -> Opened:
    """Open a model that does not hold its base, and that base."""
    tokenizer = tokenizer_of_given(given.name, given.base)
    if note := other_base(given.name, given.base):
        typer.echo(f"note: {given.name}: {note}", err=True)
    streams = move_to_device(load_given(given)).eval()
    if head == "base":
        return Opened(streams.base, load_tokenizer(given.base))
    if head == "trained":
        return Opened(streams.trained, tokenizer)
    router = Router(prior=given.prior)
    return Opened(TwoStreams(streams, router).eval(), tokenizer, given.prior)


def _open_whole(folder: Path, head: Head | None) -> Opened:
    """Open a folder that holds all that answers: a base, or an export."""
    tokenizer = load_tokenizer(ModelConfig(base=str(folder)))
    written = read_json(folder / "config.json")
    if written.get("model_type") == ScaleForCausalLM.config_class.model_type:
        streams = move_to_device(load_written(ScaleForCausalLM, folder)).eval()
        router = Router.of_widened(streams.config)
        model = TwoStreams(streams, router)
        if head == "routed" or (head is None and streams.config.routes):
            return Opened(model, tokenizer, router.prior)
        model.head = head or "trained"
        return Opened(model, tokenizer)
    routed = routed_class(folder)
    if head == "base" or (head == "routed" and routed is None):
        raise RunFolderError(
            f"{folder}: --head {head}: this folder holds only a trained model; give its run"
        )
    if routed is None or head == "trained":
        return Opened(move_to_device(load_written(AutoModelForCausalLM, folder)).eval(), tokenizer)
    model = move_to_device(load_written(routed, folder)).eval()
    return Opened(model, tokenizer, PriorByScript.of_export(written[ROUTER]))
