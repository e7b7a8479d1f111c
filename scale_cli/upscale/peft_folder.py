"""LoRA adapters as PEFT keeps them: what `PeftModel.from_pretrained` loads, and what serves adapters.

- adapter_config.json: rank, alpha, targets, and the base's name as the config has it
- adapter_model.safetensors: A and B, by PEFT's names, which say nothing of `default`, its name for the only adapter
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import StorageError
from scale_cli.storage.atomic import load_tensors, save_tensors, write_json
from scale_cli.upscale.folder import PEFT_WEIGHTS

PEFT_CONFIG = "adapter_config.json"


def write_peft(folder: Path, model: Any, base: ModelConfig) -> None:
    """Write the adapters of a PeftModel."""
    named = {"base_model_name_or_path": base.base, "revision": base.revision, "inference_mode": True}
    settings = {**model.peft_config["default"].to_dict(), **named}
    in_order = {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(settings.items())}
    write_json(folder / PEFT_CONFIG, in_order)
    # A tied embedding is there under both its names, as in PEFT's own files.
    save_tensors(folder / PEFT_WEIGHTS, {name: tensor.clone() for name, tensor in _adapters(model).items()})


def load_peft(model: Any, folder: Path) -> None:
    """Load adapters into a PeftModel that has the same ones.

    Raises:
        StorageError: a tensor is missing, unknown, or of another shape.
    """
    path, wanted = folder / PEFT_WEIGHTS, _adapters(model)
    tensors = load_tensors(path)
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        raise StorageError(f"{path}: does not fit this model ({odd[0]} is in only one of them)")
    if odd := sorted(name for name, tensor in tensors.items() if tensor.shape != wanted[name].shape):
        raise StorageError(f"{path}: does not fit this model ({odd[0]} has another shape)")
    set_peft_model_state_dict(model, tensors)


def _adapters(model: Any) -> dict[str, Tensor]:
    # The base's embedding is the base's: not looking whether it has grown also asks nothing of the hub.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return tensors
