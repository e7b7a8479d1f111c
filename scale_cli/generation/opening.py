"""Opens what can generate, and says which heads it has and how they begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from scale_cli.config.schema import ModelConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import RunFolderError
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.export.plain_folder import routed_class
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routed_scale import RoutedModel
from scale_cli.processes import move_to_device
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import set_router
from scale_cli.runs.opened import open_folder
from scale_cli.storage.atomic import read_json
from scale_cli.upscale.base import load_base, load_written
from scale_cli.upscale.base_record import BaseRecord
from scale_cli.upscale.base_tokenizer import load_tokenizer


@dataclass(frozen=True)
class PriorByScript:
    """The base head's weight at the start of a prompt, by the script of the user's words."""

    otherwise: float  # where the script does not tell
    in_script: float | None = None  # where it is the new language's; None: it never tells
    script: Script = field(default_factory=lambda: Script(()))

    def __call__(self, words: str) -> float:
        share = self.script.share(words)
        if self.in_script is None or share is None or 0.0 < share < 0.5:
            return self.otherwise
        return self.in_script if share else 1.0 - self.in_script


def open_model(source: Path | ModelConfig, *, plainly: bool, beside_base: bool) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer.

    The arguments are those of `Generator`.
    """
    if isinstance(source, ModelConfig):
        return move_to_device(load_base(source)), load_tokenizer(source)
    final = RunFolder(source).final
    folder = final if final.is_dir() else source
    if not (folder / "config.json").is_file():
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


def head_names_of(model: Any) -> list[str]:
    """Return the names of a model's routed heads; empty if one head alone is served."""
    if isinstance(model, RoutedModel):  # its config has no names
        return ["base", "trained"]
    if isinstance(model, SelectableHeads):
        return model.heads
    return list(getattr(model.config, "head_names", []))


def prior_of(model: Any) -> PriorByScript:
    """Return the prior of a model that is served: as its config says, whichever config it has."""
    if isinstance(model, RoutedModel):
        router = model.config.scale_router
        ranges = router.get("script", [])
        prior = router["prior"]
        in_script = router.get("script_prior")
    else:
        ranges = getattr(model.config, "router_script", [])
        prior = getattr(model.config, "router_prior", 0.5)
        in_script = getattr(model.config, "router_script_prior", None)
    script = Script(tuple((first, last) for first, last in ranges))
    return PriorByScript(prior, in_script if ranges else None, script)
