"""The files of a model that a method trains; `MethodFolder` (`runs/opened.py`) opens them.

Files of every method folder (`upscaled/`, a checkpoint, `final/`, an adapter):

- config.json: the model's configuration; for a widened model, the sizes of the expansion and the
  base's configuration
- method.json: the method section of the config
- base.json: the base it belongs to: name, revision, SHA-256 of every tensor
- trained.safetensors: every parameter that trains, by name (a baseline's `upscaled/` needs none); a
  sharded checkpoint has `shards/` instead (`storage/shards.py`), a LoRA adapter PEFT's own files
- manifest.json: size and SHA-256 of every file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from scale_cli.config.schema import MethodConfig, ModelConfig, RunConfig
from scale_cli.config.vocabulary import Script
from scale_cli.errors import StorageError
from scale_cli.methods.given import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.two_streams import Router
from scale_cli.runs.folder import TRAINED
from scale_cli.storage.atomic import load_fitting, read_json, save_tensors, write_json
from scale_cli.storage.shards import has_shards, load_shards
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.building import MethodModel

_METHOD = "method.json"


def describe_method(
    folder: Path, model: MethodModel, method: MethodConfig, record: BaseRecord
) -> None:
    """Write a method folder's description: everything but the parameters."""
    model.config.save_pretrained(folder)
    write_json(folder / _METHOD, method.model_dump(mode="json"))
    record.save(folder)


def write_trained(
    folder: Path, model: MethodModel, method: MethodConfig, record: BaseRecord
) -> None:
    """Write a whole method folder: its description and every parameter that trains."""
    describe_method(folder, model, method, record)
    save_tensors(folder / TRAINED, trainable_parameters(model))


def read_method(folder: Path) -> MethodConfig:
    try:
        return MethodConfig.model_validate(read_json(folder / _METHOD))
    except ValidationError:
        raise StorageError(f"{folder / _METHOD}: damaged, or written by another version") from None


def load_trained(model: MethodModel, folder: Path) -> None:
    """Load every parameter that trains."""
    wanted = trainable_parameters(model)
    if has_shards(folder):
        load_shards(folder, wanted)
        return
    model.load_state_dict(load_fitting(folder / TRAINED, wanted), strict=False)


def load_peft(model: Any, folder: Path) -> None:
    """Load what `write_peft` has written."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, load_fitting(folder / ADAPTER_WEIGHTS, _adapters(model)))


def write_peft(folder: Path, model: Any, base: ModelConfig) -> None:
    """Write a LoRA model as PEFT's own files.

    The config has rank, alpha, targets and the base's name as in our config. A and B have PEFT's
    names, without `default`, PEFT's name for the only adapter.
    """
    named = {
        "base_model_name_or_path": base.base,
        "revision": base.revision,
        "inference_mode": True,
    }
    settings = {**model.peft_config["default"].to_dict(), **named}
    in_order = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in sorted(settings.items())
    }
    write_json(folder / ADAPTER_CONFIG, in_order)
    # A tied embedding is saved under both its names, as in PEFT's own files.
    save_tensors(
        folder / ADAPTER_WEIGHTS,
        {name: tensor.clone() for name, tensor in _adapters(model).items()},
    )


def _adapters(model: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # The base's embedding is not saved. False also keeps PEFT from asking the hub whether the
    # embedding has grown.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors


def set_router(model: Any, router: RouterConfig | None, script: Script | None = None) -> None:
    """Give a routed model the router that a config asks for now, and the new language's script.

    It may differ from the one that the model was trained under. Without a router, the trained head
    answers alone.
    """
    if router is None:
        model.config.router_rule = None
        return
    for name, value in router:
        setattr(model.config, f"router_{name}", value)
    model.config.router_script = [] if script is None else [list(span) for span in script.ranges]


def router_of(config: RunConfig) -> Router:
    """Return the router of a run, which is measured also where none is served."""
    rules = config.method.rules
    ranges = () if config.new_script is None else config.new_script.ranges
    return Router.of_settings(rules, ranges)
