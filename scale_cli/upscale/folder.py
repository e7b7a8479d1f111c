"""The expansion folder: what `upscaled/`, every checkpoint, `final/` and an adapter have in common.

config.json            sizes of the expansion, and the base's own configuration
base.json              which base it belongs to: name, revision, SHA-256 of every tensor
expansion.safetensors  every added block, float32
manifest.json          size and SHA-256 of every file
"""

from __future__ import annotations

from pathlib import Path

from scale_cli.config.schema import ModelConfig
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.model.configuration_scale import ScaleConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import MANIFEST, load_tensors, read_json, save_tensors, verify_folder, write_json
from scale_cli.upscale.base import BaseRecord, check_same_base, load_base

EXPANSION = "expansion.safetensors"
BASE_RECORD = "base.json"


def write_expansion(folder: Path, model: ScaleForCausalLM, record: BaseRecord) -> None:
    """Write a model's expansion, its configuration and its base's record into a folder."""
    model.config.save_pretrained(folder)
    write_json(folder / BASE_RECORD, record.to_json())
    save_tensors(folder / EXPANSION, model.expansion.state_dict())


def read_record(folder: Path) -> BaseRecord:
    """Read which base an expansion folder belongs to."""
    return BaseRecord.from_json(read_json(folder / BASE_RECORD))


def trained_sha256(folder: Path) -> str:
    """Return the hash of an expansion folder's blocks, as its manifest has it."""
    sha256: str = read_json(folder / MANIFEST)["files"][EXPANSION]["sha256"]
    return sha256


def load_widened(folder: Path, model: ModelConfig) -> ScaleForCausalLM:
    """Load a base and the expansion in a folder, after checking both against their hashes.

    Raises:
        RunFolderError: the folder is not there.
        StorageError: the folder is damaged.
        BaseModelError: the base is not the one that was widened.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder; run the verb that makes it first")
    verify_folder(folder)
    return load_onto_base(folder, model)


def load_onto_base(folder: Path, model: ModelConfig) -> ScaleForCausalLM:
    """Load a base, check that it is the recorded one, and put the expansion in a folder on it.

    Raises:
        BaseModelError: the base is not the one that was widened.
    """
    base = load_base(model)
    check_same_base(base, read_record(folder), where=f"model.base {model.base}")
    widened = ScaleForCausalLM(ScaleConfig.from_pretrained(folder), base)
    load_expansion(widened, folder)
    return widened.eval()


def load_expansion(model: ScaleForCausalLM, folder: Path) -> None:
    """Load an expansion folder's blocks into a model that has them.

    Raises:
        StorageError: a block is missing, unknown, or of another shape.
    """
    try:
        model.expansion.load_state_dict(load_tensors(folder / EXPANSION))
    except RuntimeError as error:
        raise StorageError(f"{folder / EXPANSION}: does not fit this model ({error})") from None
