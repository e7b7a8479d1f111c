"""The base model: load it, and refuse one that cannot be trained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import BaseModelError, StorageError, one_line, require
from scale_cli.model.family_scale import FAMILIES
from scale_cli.processes import device
from scale_cli.upscale.base_files import (
    NAME_THE_ORIGINAL,
    check_config_file,
    check_keys,
    file_marks,
)
from scale_cli.upscale.quantised_base import parts_of, quantise, torchao_settings

_LARGEST = 2**24  # far above any size in an existing model
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
)
# Tensors that old checkpoints hold although they are computed anew.
_LEFTOVERS = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids|masked_bias)$")
_DROPOUTS = ("attention_dropout", "embd_pdrop", "resid_pdrop")

# Options for loading a base or an export: no pickle, no code from its folder, and no prompt.
_PLAIN_WEIGHTS: Any = {"use_safetensors": True, "trust_remote_code": False}


# SHA-256 of the tensors that this process has loaded: by dtype and marks of the files, then by
# name.
_HASHES: dict[tuple[Any, ...], dict[str, str]] = {}


def load_hashed_base(model: ModelConfig) -> tuple[PreTrainedModel, dict[str, str]]:
    """Load a base, with the hashes that this process already has of tensors from the same files.

    Files are the same if their sizes, inodes and times of change are, before and after loading.
    `record_base` and `check_same_base` read the hashes, and add what they compute.
    """
    marks = file_marks(model)
    base = load_base(model)
    if not marks or file_marks(model) != marks:
        return base, {}
    return base, _HASHES.setdefault((model.held_in, marks), {})


def load_base(model: ModelConfig) -> PreTrainedModel:
    """Return a frozen base in `model.dtype`; `auto` is float32 here, since a run decides what it is
    there.
    """
    config = load_base_config(model)
    dtype = torch.float32 if model.dtype == "auto" else getattr(torch, model.dtype)
    quantising: dict[str, Any] = {}
    if model.quantisation is not None:
        require("torchao", f"model.quantisation {model.quantisation}")
        settings = TorchAoConfig(torchao_settings())
        quantising = {"quantization_config": settings, "device_map": {"": device()}}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model.base,
            revision=model.revision,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            **_PLAIN_WEIGHTS,
            **quantising,
        )
    except Exception as error:  # a damaged folder may raise anything
        raise BaseModelError(
            f"model.base: the weights of {model.base} cannot be loaded: {one_line(error)}"
        ) from None
    base: PreTrainedModel
    base, report = loaded
    if problem := unread_weights(report, base):
        raise BaseModelError(f"model.base: {model.base} {problem}")
    if model.quantisation is not None:
        hf_quantizer: Any = base.hf_quantizer
        # An export copies the configuration, without quantised weights.
        hf_quantizer.remove_quantization_config(base)
    return base.requires_grad_(False).eval()


def unread_weights(report: dict[str, Any], model: PreTrainedModel) -> str | None:
    """Return in what weights and config.json disagree; None if every tensor was read into the
    model.

    transformers would start missing weights at random, drop those that config.json does not ask
    for, and untie tied weights that differ.
    """
    missing = sorted(report["missing_keys"])
    unknown = sorted(key for key in report["unexpected_keys"] if not _LEFTOVERS.search(key))
    for names, problem in (
        (missing, "has no weights for {}"),
        (
            unknown,
            "has weights that its config.json does not ask for: {}; without them it would be another model; "
            "correct config.json (a bias needs attention_bias or mlp_bias), or remove them",
        ),
    ):
        if names:
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            return problem.format(names[0] + more)
    head = model.get_output_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        return "has a vocabulary head of its own, but tie_word_embeddings in config.json; set that to false"
    return None


def load_written(loader: Any, folder: Path) -> Any:
    """Load a model that scale wrote; StorageError if a weight is missing, or is read into nothing."""
    try:
        model, report = loader.from_pretrained(
            folder, dtype="auto", output_loading_info=True, **_PLAIN_WEIGHTS
        )
    except Exception as error:  # a damaged folder may raise anything
        raise StorageError(f"{folder}: cannot be loaded: {one_line(error)}") from None
    if problem := unread_weights(report, model):
        raise StorageError(f"{folder}: {problem}")
    return model


def base_without_weights(
    config: Any, dtype: str, quantisation: str | None = None
) -> PreTrainedModel:
    """Return a frozen base model on the meta device: shapes and dtypes without weights."""
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        )
    if quantisation is not None:
        require("torchao", f"model.quantisation {quantisation}")
        quantise(base)
    return base.requires_grad_(False).eval()


def load_base_config(model: ModelConfig) -> Any:
    """Load the configuration of a base; BaseModelError says why it cannot be trained."""
    supported = f"supported: {', '.join(FAMILIES)}"
    check_config_file(model)
    try:
        config = AutoConfig.from_pretrained(
            model.base, revision=model.revision, trust_remote_code=False
        )
    except Exception as error:  # a damaged folder may raise anything
        raise BaseModelError(f"model.base: {_not_loaded(model.base, error)}") from None
    # No run uses dropout: training must not depend on random numbers that a checkpoint does not
    # store.
    config.update({key: 0.0 for key in _DROPOUTS if hasattr(config, key)})
    if config.model_type not in FAMILIES:
        raise BaseModelError(
            f"model.base: {model.base} is of the family {config.model_type}, which is not supported ({supported})"
        )
    check_keys(config.to_dict(), model.base)
    if "/" in str(config._attn_implementation):  # transformers would download and run it
        raise BaseModelError(
            f"model.base: {model.base} asks for a kernel from the hub ({config._attn_implementation}), which scale "
            "does not load"
        )
    for key in _SIZES:
        size = getattr(config, key, None)
        if size is None and key == "head_dim":  # then it is hidden_size / num_attention_heads
            continue
        # Before memory is allocated for it.
        if type(size) is not int or not 1 <= size <= _LARGEST:
            raise BaseModelError(
                f"model.base: {model.base}: {key} in config.json is {size!r}, not between 1 and {_LARGEST:,}"
            )
    if config.num_attention_heads % config.num_key_value_heads:
        raise BaseModelError(
            f"model.base: {model.base}: {config.num_attention_heads} num_attention_heads cannot share "
            f"{config.num_key_value_heads} num_key_value_heads"
        )
    return config


def dtype_of_files(model: ModelConfig) -> str:
    """Return the dtype of a base's own files by its config.json; float32 if that does not say."""
    dtype = load_base_config(model).dtype
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def _not_loaded(name: str, error: Exception) -> str:
    """Say why the configuration of a base cannot be loaded; the name may be meant as a folder or as
    a hub id.
    """
    if Path(name).is_dir():
        return f"{name} cannot be loaded: {one_line(error)}"
    if "gguf" in name.lower():
        return (
            f"{name} is in llama.cpp's format (GGUF), which cannot be trained; {NAME_THE_ORIGINAL}"
        )
    return (
        f"{name} is neither a folder in {Path.cwd()} nor a model that the hub gives: "
        f"{one_line(error)}"
    )


def check_finite(tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Raise BaseModelError if a weight is not finite: NaN logits equal nothing, not even
    themselves.
    """
    for tensor_name, tensor in tensors:
        for held in parts_of(tensor):
            # NaN gives NaN bounds; no copy is allocated.
            if all(bound.isfinite() for bound in held.aminmax()):
                continue
            bad = held.numel() - int(held.isfinite().count_nonzero())
            raise BaseModelError(
                f"{name}: {tensor_name} holds numbers that are not finite ({bad:,} of {held.numel():,})"
            )
