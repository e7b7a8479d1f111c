"""The method folder: what `upscaled/`, every checkpoint, `final/` and an adapter have in common.

- config.json: the model's configuration; of a widened model, sizes of the expansion and the base's own
- method.json: the method section of the config
- base.json: which base it belongs to: name, revision, SHA-256 of every tensor
- trained.safetensors: every parameter that trains, by name (the `upscaled/` of a baseline needs none); in a sharded
  checkpoint `shards/` in its place (`storage/shards.py`), in a LoRA adapter PEFT's own files
- manifest.json: size and SHA-256 of every file
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.errors import BaseModelError, StorageError
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import Share
from scale_cli.storage.atomic import load_tensors, read_json, save_tensors, verify_folder, write_json
from scale_cli.storage.records import TRAINED, BaseRecord
from scale_cli.storage.shards import has_shards, load_shards
from scale_cli.upscale.base import base_without_weights, check_same_base, load_base, load_base_config, stages_below
from scale_cli.upscale.method import MethodModel, NewPieces, grow_plainly

# As PEFT keeps adapters, which `PeftModel.from_pretrained` and servers of adapters load: rank, alpha, targets and the
# base's name as the config has it; A and B, by PEFT's names, which say nothing of `default`, its name for the only one.
_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_METHOD = "method.json"


def describe_method(folder: Path, model: MethodModel, method: MethodConfig, record: BaseRecord) -> None:
    """Write what a folder says of itself: everything but the parameters."""
    model.config.save_pretrained(folder)
    write_json(folder / _METHOD, method.model_dump(mode="json"))
    record.save(folder)


def write_trained(folder: Path, model: MethodModel, method: MethodConfig, record: BaseRecord) -> None:
    """Write a whole method folder: its description and every parameter that trains."""
    describe_method(folder, model, method, record)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    save_tensors(folder / TRAINED, trained)


def load_any_base(model: ModelConfig) -> PreTrainedModel:
    """Load a base, frozen and in evaluation mode: a plain model, or one that an earlier run has widened."""
    if (stage := _stage(model)) is None:
        return load_base(model)
    folder, below = stage
    verify_folder(folder)
    widened: Any = load_onto_base(folder, below).requires_grad_(False)
    return widened


def any_base_without_weights(model: ModelConfig) -> PreTrainedModel:
    """Return what `load_any_base` loads, of shapes and dtypes alone, on the meta device."""
    if (stage := _stage(model)) is None:
        return base_without_weights(load_base_config(model), model.dtype)
    folder, below = stage
    base = any_base_without_weights(below)
    with torch.device("meta"):
        widened: PreTrainedModel = ScaleForCausalLM(ScaleConfig.from_pretrained(folder), base)
    return widened.requires_grad_(False)


def _stage(model: ModelConfig) -> tuple[Path, ModelConfig] | None:
    """Return the folder of a widened base, and what it stands on, or say why nothing more can stand on it."""
    if (stage := next(stages_below(model), None)) is None:
        return None
    folder, below = stage[0], stage[1].model
    if below.dtype != model.dtype:
        raise BaseModelError(f"model.dtype: {model.dtype}, but {model.base} was trained on a base in {below.dtype}")
    if not read_method(folder).definition.widens:
        raise BaseModelError(f"model.base: {model.base} holds no expansion; export it as llama and widen that")
    return folder, below


def read_method(folder: Path) -> MethodConfig:
    """Read the method section that a folder was made with."""
    try:
        return MethodConfig.model_validate(read_json(folder / _METHOD))
    except ValidationError:
        raise StorageError(f"{folder / _METHOD}: damaged, or written by another version") from None


def load_onto_base(folder: Path, base: ModelConfig, seed: int = 0, of_machine: Share | None = None) -> MethodModel:
    """Load a base as `load_recorded_base`, and put a folder's parameters on it."""
    return put_on_base(folder, load_recorded_base(folder, base, of_machine), seed)


def load_recorded_base(folder: Path, base: ModelConfig, of_machine: Share | None = None) -> PreTrainedModel:
    """Load a base, and check that it is the one that a folder stands on.

    With a share of its machine's processes all of a launch have to call this: each hashes a part of the base.
    """
    loaded = load_any_base(base)
    check_same_base(loaded, BaseRecord.load(folder), f"model.base {base.base}", of_machine)
    return loaded


def put_on_base(folder: Path, loaded: PreTrainedModel, seed: int = 0) -> MethodModel:
    """Return the model that a folder's parameters make of a base, in evaluation mode; the base becomes a part of it."""
    method = read_method(folder)
    if method.vocabulary is not None and not method.definition.widens:
        written = read_json(folder / "config.json")
        loaded = grow_plainly(loaded, NewPieces(written["new_tokens"], written["own_pieces"]))
    if method.trains_base_weights:
        loaded.float()
    model: MethodModel = method.definition.restore(folder, loaded, method.settings, seed)
    if (folder / TRAINED).exists() or has_shards(folder):
        load_trained(model, folder)
    elif (folder / _PEFT_WEIGHTS).exists():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, _fitting(folder / _PEFT_WEIGHTS, _adapters(model)))
    return model.eval()


def load_trained(model: MethodModel, folder: Path) -> None:
    """Load a folder's parameters into a model that trains the same ones."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if has_shards(folder):
        load_shards(folder, wanted)
        return
    model.load_state_dict(_fitting(folder / TRAINED, wanted), strict=False)


def _fitting(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that have the names and shapes of those of a model."""
    tensors = load_tensors(path)
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        raise StorageError(f"{path}: does not fit this model ({odd[0]} is in only one of them)")
    if odd := sorted(name for name, tensor in tensors.items() if tensor.shape != wanted[name].shape):
        raise StorageError(f"{path}: does not fit this model ({odd[0]} has another shape)")
    return tensors


def write_peft(folder: Path, model: Any, base: ModelConfig) -> None:
    """Write the adapters of a PeftModel."""
    named = {"base_model_name_or_path": base.base, "revision": base.revision, "inference_mode": True}
    settings = {**model.peft_config["default"].to_dict(), **named}
    in_order = {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(settings.items())}
    write_json(folder / _PEFT_CONFIG, in_order)
    # A tied embedding is there under both its names, as in PEFT's own files.
    save_tensors(folder / _PEFT_WEIGHTS, {name: tensor.clone() for name, tensor in _adapters(model).items()})


def _adapters(model: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # The base's embedding is the base's: not looking whether it has grown also asks nothing of the hub.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors
