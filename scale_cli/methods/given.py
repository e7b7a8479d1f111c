"""Given: nothing trains; the model was trained elsewhere, as a PEFT adapter or as whole weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_cli.errors import BaseModelError, one_line, require
from scale_cli.methods.method import Method, MethodSection
from scale_cli.methods.stream_kinds import ADAPTER

if TYPE_CHECKING:
    from collections.abc import Mapping

# PEFT's files of an adapter, which `PeftModel.from_pretrained` and adapter servers load.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Starts of A and B that change the base's weights when the adapter is loaded.
_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Of PEFT's settings, those that say how A and B started, or how they run, and those whose effect is
# tried against PEFT. Another one may change the base, or what is computed beside it.
_TAKEN = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
    *("revision", "runtime_config", "task_type", "init_lora_weights", "ensure_weight_tying"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *(
        "alpha_pattern",
        "exclude_modules",
        "fan_in_fan_out",
        "layers_pattern",
        "layers_to_transform",
    ),
    *("lora_alpha", "lora_bias", "lora_dropout", "modules_to_save", "r", "rank_pattern"),
    *("target_modules", "target_parameters", "trainable_token_indices", "use_dora", "use_rslora"),
}


def file_of(name: str, file: str) -> Path | None:
    """Return a file of a folder or of a repository on the hub; None if there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from transformers.utils.hub import cached_files

    try:
        found = cached_files(name, [file], _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise BaseModelError(
            f"{name}: neither a folder nor a model that the hub gives: {one_line(error)}"
        ) from None
    return Path(found[0]) if found else None


def put_adapter_on(base: Any, folder: Path, name: str) -> Any:
    """Return a base with the modules of a PEFT adapter whose settings lie in a folder; they train,
    and have no weights of the adapter yet. No weight of the base changes.
    """
    require("peft", f"the adapter {name}")
    from peft import PeftConfig, get_peft_model

    try:
        settings: Any = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever a damaged or newer file raises
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise BaseModelError(f"{name}: {ADAPTER_CONFIG}: PEFT cannot read it: {problem}") from None
    if settings.peft_type != "LORA":
        raise BaseModelError(f"{name}: peft_type is {settings.peft_type.value}; only LORA is read")
    rewrites = str(settings.init_lora_weights).lower().startswith(_REWRITING)
    if rewrites or settings.bias != "none" or settings.layer_replication:
        key = "init_lora_weights" if rewrites else "layer_replication"
        key = "bias" if settings.bias != "none" else key
        raise BaseModelError(
            f"{name}: {key} is {getattr(settings, key)}, which changes the base itself; "
            "merge it (merge_and_unload), and give the merged model"
        )
    usual = vars(type(settings)())
    told = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    changed = {key for key in usual.keys() & told.keys() if told[key] != usual[key]}
    # Of a newer PEFT's settings, its numbers and words belong to a switch or a section.
    newer = {
        key
        for key in told.keys() - usual.keys()
        if isinstance(told[key], bool | list | dict) and told[key]
    }
    unknown = sorted((changed | newer) - _TAKEN)
    if unknown:
        raise BaseModelError(
            f"{name}: {ADAPTER_CONFIG}: {', '.join(unknown)}: not read; if it can be merged "
            "(merge_and_unload), give the merged model"
        )
    settings.inference_mode = False
    settings.init_lora_weights = True  # whatever it is, the adapter's own weights come next
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is checked when it is loaded
            return get_peft_model(base, settings)
    except Exception as error:  # a target that the base does not have, or a damaged file
        raise BaseModelError(f"{name}: does not fit the base: {one_line(error)}") from None


class Given(Method[MethodSection]):
    """A model that others trained, whole; what is written down is a copy of its weights."""

    name = "given"
    label = "given model"
    colour = "#777777"
    mark = ("D", "◆")
    train_defaults = {}
    trains = False

    def completed(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        name = tree.get("model")
        if tree.get("kind") is not None or not isinstance(name, str) or not name:
            return tree
        return {**tree, "kind": "copy" if file_of(name, ADAPTER_CONFIG) is None else "adapter"}

    def of(self, settings: Any) -> Method[Any]:
        return _ADAPTER if settings.kind == "adapter" else self

    def in_words(self, settings: Any) -> str:
        return f", {Path(settings.model).name}"

    def trains_base_weights(self, settings: Any) -> bool:
        return False

    def build(self, base: Any, settings: Any, seed: int, new: Any = None) -> Any:
        return base  # of its sizes; what was given is not built

    def restore(self, folder: Path, base: Any, settings: Any, seed: int) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
        model.generation_config = base.generation_config
        return model.requires_grad_(True)


class _GivenAdapter(Given):
    """An adapter that others trained."""

    streams = ADAPTER
    exports = ("adapter",)

    def restore(self, folder: Path, base: Any, settings: Any, seed: int) -> Any:
        return put_adapter_on(base, folder, settings.model or str(folder))


_ADAPTER = _GivenAdapter()
