"""Opens what can generate."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import RunFolderError
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.export.plain_folder import routed_class
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import set_router
from scale_cli.runs.opened import open_folder
from scale_cli.storage.atomic import read_json
from scale_cli.training.checkpoint import checkpoints
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.base_tokenizer import load_tokenizer


def open_model(source: Path | ModelConfig, *, plainly: bool, beside_base: bool) -> tuple[Any, Any]:
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
        opened = open_folder(folder)
        if not beside_base:
            return opened.load(), opened.tokenizer
        router = opened.run.config.method.router
        model = SelectableHeads(opened.load_two_headed(), router)
        model.head = router.rule
        set_router(model, router, opened.run.config.new_script)
        return model.eval(), opened.tokenizer

    if beside_base:
        raise RunFolderError(f"{source}: does not name its base; give the run for --beside-base")
    kind = read_json(folder / "config.json").get("model_type")
    loaders: dict[Any, Any] = {"scale": ScaleForCausalLM, "scale-joined": JoinedForCausalLM}
    loader = loaders.get(kind, AutoModelForCausalLM)
    if not plainly:
        loader = routed_class(folder) or loader
    model = move_to_device(load_written(loader, folder)).eval()
    return model, load_tokenizer(ModelConfig(base=str(folder)))
