"""Sharded tensors: every process writes its parts as safetensors, and any number of processes can
read them.

The format is that of torch.distributed.checkpoint's safetensors storage, which also reads them:
each file holds parts of tensors, and their places in its JSON header. A process writes its file
independently of the others.
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
_PLACES = "DCP_SHARDING_INFO"  # torch's header key for the parts' places


class ShardFile(NamedTuple):
    """The file that one process writes."""

    file: str  # path below the folder
    tensors: dict[str, Tensor]  # whole tensors, or parts of them
    header: dict[str, str]  # the parts' places in the whole tensors


def has_shards(folder: Path) -> bool:
    """Return whether a folder's tensors are sharded."""
    return (folder / _SHARDS).is_dir()


def shard_of(tensors: Mapping[str, Tensor], share: Share) -> ShardFile:
    """Return this process's share of some tensors, without a copy; the other processes write the
    rest.
    """
    parts = {}
    places = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, DTensor):
            is_ours = _is_writer(tensor, index)
            part = tensor.to_local()
            _, offsets = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        else:
            is_ours = share.index == 0
            part = tensor
            offsets = (0,) * tensor.dim()
        if is_ours and part.numel():
            parts[name] = part
            places[name] = {"saved_offsets": list(offsets)}
    file = f"{_SHARDS}/shard-{share.index + 1:05}-of-{share.num_processes:05}.safetensors"
    return ShardFile(file, parts, {_PLACES: json.dumps(places)})


def _is_writer(tensor: DTensor, index: int) -> bool:
    """Return whether this process writes its part of tensor `index`; processes with the same part
    take turns.
    """
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for place, placement, size in zip(
        coordinate, tensor.placements, tensor.device_mesh.shape, strict=True
    ):
        if placement.is_replicate():
            if place != index % size:
                return False
            index //= size
    return True


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, sharded or whole, from a folder's sharded or whole safetensors files.

    Each process reads only what it holds. In a group, every process must call this.
    """
    where = folder / _SHARDS if has_shards(folder) else folder
    reader = HuggingFaceStorageReader(path=str(where))
    try:
        with warnings.catch_warnings():
            # One process alone has no group.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader)
    except (CheckpointException, RuntimeError, ValueError) as error:
        of_processes = getattr(error, "failures", None) or {0: (error, None)}
        first, _ = next(iter(of_processes.values()))
        raise StorageError(f"{where}: does not fit this model ({one_line(first)})") from None
