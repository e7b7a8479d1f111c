"""The files of a base, checked without torch, so that what is missing is said within a second;
and the record of a base by hashes: which model it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import BaseModelError, one_line
from scale_cli.methods.given import ADAPTER_CONFIG
from scale_cli.storage.atomic import read_json
from scale_cli.storage.records import RunRecord

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# By family: keys of config.json that must be null or false.
_REFUSED = {
    "gemma3_text": (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    )
}
NAME_THE_ORIGINAL = "name the transformers model from which it was made"

REMEDY = "restore the earlier one, or start anew in another output_dir"


@dataclass(frozen=True)
class BaseRecord(RunRecord):
    """The base model that a trained model belongs to; in every method folder."""

    FILE = "base.json"
    name: str  # hub id or folder, as the config gave it
    revision: str | None  # the hub's commit, if it came from there
    dtype: str  # of the hashed tensors
    tensors: dict[str, str]  # SHA-256 of every tensor, by name
    config_sha256: str  # of the configuration's keys that affect computing: sizes, norms, RoPE
    tokenizer_sha256: str  # of the files that the tokenizer saves; empty if not recorded

    @property
    def content_sha256(self) -> str:
        """One hash for the whole model, independent of its folder."""
        lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(self.tensors.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"content_sha256": self.content_sha256, **asdict(self)}


def looks_local(name: str) -> bool:
    """Return whether a base's name is a folder rather than a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def check_config_file(model: ModelConfig) -> None:
    """Raise BaseModelError if a base is a run, or a local base is no transformers model with
    safetensors.
    """
    name = model.base
    base = Path(model.base)
    if any(BaseRecord.is_in(folder) for folder in (base, base / "final", base / "upscaled")):
        raise BaseModelError(
            f"model.base: {name} is a run, which is no base for another; export it as plain and "
            "name that export"
        )
    if not looks_local(name):
        return
    has_config = (base / "config.json").is_file()
    adapter = base / ADAPTER_CONFIG
    if base.suffix == ".gguf" or (not has_config and any(base.glob("*.gguf"))):
        problem = f"is in llama.cpp's format (GGUF), which cannot be trained; {NAME_THE_ORIGINAL}"
    elif adapter.is_file():
        named = read_json(adapter).get("base_model_name_or_path") or "not named there"
        problem = (
            f"is a PEFT adapter (its base: {named}), not a whole model; merge it into that base in "
            "PEFT (merge_and_unload, then save_pretrained), and name the folder that this writes"
        )
    elif not has_config:
        place = "" if base.is_absolute() else f" in {Path.cwd()}"
        problem = f"is not a folder with a config.json{place}"
    elif (pickles := sorted(base.glob("pytorch_model*.bin"))) and not any(
        base.glob("*.safetensors")
    ):
        problem = (
            f"has only pickled weights ({pickles[0].name}), which may run code and are not loaded; "
            "convert them in transformers: load the model, then save_pretrained writes "
            "model.safetensors"
        )
    else:
        shards_of(base)
        return
    raise BaseModelError(f"model.base: {name} {problem}")


def check_weight_files(model: ModelConfig) -> None:
    """Raise BaseModelError if a local base's weight files are missing or damaged; reads headers."""
    folder = Path(model.base)
    if not folder.is_dir():  # on the hub: not known before the download
        return
    for name in shards_of(folder) or [WEIGHTS]:
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise BaseModelError(
                f"model.base: {folder / name} cannot be loaded: {one_line(error)}"
            ) from None


def shards_of(folder: Path) -> list[str]:
    """Return the files that an index of weights names; BaseModelError if one is outside the folder."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        shards = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BaseModelError(f"model.base: {index} is not a valid index of weights") from None
    if odd := [of for of in shards if not isinstance(of, str) or Path(of).name != of]:
        raise BaseModelError(
            f"model.base: {index} names {odd[0]!r}, which is not a file in the folder"
        )
    return sorted(set(shards))


def file_marks(model: ModelConfig) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, inode and time of change (ns) of each file that a base's tensors come
    from.

    A base from the hub is looked up in the hub's cache; what is not there yet has no marks.
    """
    folder = Path(model.base)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model.base, "config.json", revision=model.revision)
        if not isinstance(cached, str):
            return ()
        folder = Path(cached).parent
    marks = []
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors*")]):
        at = path.stat()
        marks.append((str(path), at.st_size, at.st_ino, at.st_mtime_ns))
    return tuple(marks)


def check_keys(config: Mapping[str, Any], name: str) -> None:
    """Raise BaseModelError for a key of config.json that no widened model follows."""
    if config.get("quantization_config") is not None:
        raise BaseModelError(
            f"model.base: {name} is already quantised; name the unquantised model, and set "
            "model.quantisation"
        )
    for key in _REFUSED.get(config.get("model_type", ""), ()):
        if value := config.get(key):
            raise BaseModelError(
                f"model.base: {name}: {key} in config.json is {value!r}; scale cannot train such a model"
            )
