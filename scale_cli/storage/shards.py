"""Tensors in parts: every process writes the parts it holds, as safetensors, and any number of processes reads them.

By torch.distributed.checkpoint with its safetensors storage: each file holds parts of tensors, and their places in its
JSON header. Nothing else is written: the `.metadata` pickle of the default storage does not exist.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scale_cli.errors import StorageError, one_line

_SHARDS = "shards"


def has_shards(folder: Path) -> bool:
    """Return whether a folder's tensors are in parts."""
    return (folder / _SHARDS).is_dir()


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's parts of some tensors; every process has to call this, with the same names."""
    writer = HuggingFaceStorageWriter(path=str(folder / _SHARDS), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise StorageError(f"{folder}: could not be written ({_first_reason(error)})") from None


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
