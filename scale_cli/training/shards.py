"""Sharded checkpoints: every process writes its own parts, as safetensors, and any number of processes reads them.

By torch.distributed.checkpoint with its safetensors storage: each file holds parts of tensors, and their places in its
JSON header. Nothing else is written: the `.metadata` pickle of the default storage does not exist.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scale_cli.errors import StorageError
from scale_cli.storage.atomic import new_folder, partial_folder
from scale_cli.training.optimiser import empty_optimiser_tensors, load_optimiser_tensors, trainable_parameters
from scale_cli.upscale.folder import SHARDS


@contextmanager
def folder_of_all(path: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield one folder to every process, to be filled together; `new_folder` for all of them.

    Args:
        path: on a file system that every process sees.
        accelerator: processes.
    """
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()  # the folder is there
        yield partial_folder(path)
        accelerator.wait_for_everyone()  # every file is
        return
    with new_folder(path) as partial:
        accelerator.wait_for_everyone()
        yield partial
        accelerator.wait_for_everyone()


def has_shards(folder: Path) -> bool:
    """Return whether a checkpoint is a sharded model's."""
    return (folder / SHARDS).is_dir()


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's parts of some tensors; every process has to call this, with the same names.

    Raises:
        StorageError: a process could not write.
    """
    writer = HuggingFaceStorageWriter(path=str(folder / SHARDS), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise StorageError(f"{folder}: could not be written ({_first_reason(error)})") from None


def load_shards(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Load parameters and moments, of either kind of checkpoint; each process reads what it holds of them.

    Raises:
        StorageError: a tensor is missing or of another shape.
    """
    moments = empty_optimiser_tensors(model)
    where = folder / SHARDS if has_shards(folder) else folder
    reader = HuggingFaceStorageReader(path=str(where))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process has no group: no matter
            load({**trainable_parameters(model), **moments}, storage_reader=reader)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise StorageError(f"{where}: does not fit this model ({_first_reason(error)})") from None
    load_optimiser_tensors(optimiser, model, moments)


def _first_reason(error: BaseException) -> str:
    """Return one line: the first process's reason where several failed."""
    if isinstance(error, CheckpointException) and error.failures:
        reason = next(iter(error.failures.values()))
        error = reason[0] if isinstance(reason, tuple) else reason
    return " ".join(str(error).split())
