"""Tensors in parts: every process writes the parts it holds, as safetensors, and any number of processes reads them.

Read by torch.distributed.checkpoint with its safetensors storage, in whose form they are written: each file holds parts
of tensors, and their places in its JSON header. A process needs no other to write its file.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from scale_cli.errors import StorageError, one_line
from scale_cli.processes import Share

_SHARDS = "shards"
_PLACES = "DCP_SHARDING_INFO"  # torch's name for them


class Shard(NamedTuple):
    """What one process writes of some tensors."""

    file: str  # below the folder
    tensors: dict[str, Tensor]  # those that it holds, or its parts of them
    header: dict[str, str]  # where they lie in the whole ones


def has_shards(folder: Path) -> bool:
    """Return whether a folder's tensors are in parts."""
    return (folder / _SHARDS).is_dir()


def shard_of(tensors: Mapping[str, Tensor], share: Share) -> Shard:
    """Return what this process writes of some tensors, of which others write the rest; nothing is copied."""
    parts, places = {}, {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            part, offsets = tensor if share.index == 0 else None, (0,) * tensor.dim()
        else:
            part = tensor.to_local() if _is_writer(tensor, index) else None
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if part is not None and part.numel():
            parts[name], places[name] = part, {"saved_offsets": list(offsets)}
    file = f"{_SHARDS}/shard-{share.index + 1:05}-of-{share.num_processes:05}.safetensors"
    return Shard(file, parts, {_PLACES: json.dumps(places)})


def _is_writer(tensor: DTensor, index: int) -> bool:
    """Return whether this process writes its part of the index-th tensor: those that hold the same part take turns."""
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for place, placement, size in zip(coordinate, tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            if place != index % size:
                return False
            index //= size
    return True


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, sharded or whole, from a folder's parts or from its whole safetensors files.

    Each process reads what it holds; in a group of processes all of them have to call this.
    """
    where = folder / _SHARDS if has_shards(folder) else folder
    reader = HuggingFaceStorageReader(path=str(where))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process has no group: no matter
            load(dict(tensors), storage_reader=reader)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise StorageError(f"{where}: does not fit this model ({_first_reason(error)})") from None


def _first_reason(error: BaseException) -> str:
    """Return one line: the first process's reason where several failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    return one_line(error)
