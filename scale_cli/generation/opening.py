"""Opens what can generate."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from scale_cli.config.schema import Head, ModelConfig
from scale_cli.errors import RunFolderError
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.export.plain_folder import routed_class
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import set_router
from scale_cli.runs.opened import MethodFolder, open_folder
from scale_cli.storage.atomic import read_json
from scale_cli.training.checkpoint import checkpoints
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_tokenizer import load_tokenizer


def open_model(source: Path | ModelConfig, head: Head | None) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer.

    The arguments are those of `Generator`.
    """
    if isinstance(source, ModelConfig):
        return move_to_device(load_base(source)), load_tokenizer(source)
    run = RunFolder(source)
    folder = run.final if run.final.is_dir() else source
    if not (folder / "config.json").is_file():
        if begun := checkpoints(run):
            raise RunFolderError(
                f"{source}: has not ended, so it has no final/; generate with its newest "
                f"checkpoint: scale generate {shlex.quote(str(begun[-1]))}"
            )
        raise RunFolderError(
            f"{source}: contains no model; give a run with a final/, a checkpoint or an export"
        )
    if BaseRecord.is_in(folder):
        return _open_on_base(open_folder(folder), head)
    return _open_whole(folder, head), load_tokenizer(ModelConfig(base=str(folder)))


def _open_on_base(opened: MethodFolder, head: Head | None) -> tuple[Any, Any]:
    """Open what a method folder and its base answer with."""
    config = opened.run.config
    head = head or config.method.head
    if head == "base":
        return move_to_device(opened.load_base()), opened.run.base_tokenizer
    if head == "trained":
        model: Any = opened.load()
        set_router(model, None)
        return model, opened.tokenizer
    routed = SelectableHeads(opened.load_two_headed(), config.method.rules)
    routed.head = config.method.rules.rule
    set_router(routed, config.method.rules, config.new_script)
    return routed.eval(), opened.tokenizer


def _open_whole(folder: Path, head: Head | None) -> Any:
    """Open a folder that holds all that answers: a base, or an export."""
    kind = read_json(folder / "config.json").get("model_type")
    is_widened = kind == "scale"
    routed = ScaleForCausalLM if is_widened else routed_class(folder)
    if head == "base" or (head == "routed" and routed is None):
        raise RunFolderError(
            f"{folder}: --head {head}: this folder holds only a trained model; give its run"
        )
    loader = routed if head != "trained" or is_widened else None
    model = move_to_device(load_written(loader or AutoModelForCausalLM, folder)).eval()
    if head == "trained" and is_widened:
        set_router(model, None)
    return model
