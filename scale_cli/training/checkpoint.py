"""Checkpoints: what trains, the optimiser, and the position, each whole or absent.

A checkpoint is a method folder (`upscale/folder.py`) and beside it

    optimiser.safetensors  the moments of every trainable parameter
    position.json          step, tokens seen, seconds trained
    scale.yaml             the resolved config
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import PreservationError, StorageError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import (
    load_tensors,
    new_folder,
    read_json,
    save_tensors,
    verify_folder,
    write_json,
    write_text,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.training.optimiser import load_optimiser_tensors, optimiser_tensors
from scale_cli.upscale.base import BaseRecord, changed_tensors
from scale_cli.upscale.folder import MethodModel, load_trained, write_trained

_OPTIMISER = "optimiser.safetensors"
_POSITION = "position.json"
CORPORA = "corpora.json"


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Args:
        step: optimiser steps done.
        num_tokens: target tokens trained on.
        elapsed_s: seconds of training, over all resumes.
        skipped_steps: of the steps done, those left out because their loss or gradient was not finite.
    """

    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    skipped_steps: int = 0

    def advanced(self, num_tokens: int, elapsed_s: float) -> Position:
        """Return the position one step on."""
        return replace(self, step=self.step + 1, num_tokens=self.num_tokens + num_tokens, elapsed_s=elapsed_s)

    def skipped(self, elapsed_s: float) -> Position:
        """Return the position one step on, that step left out."""
        return replace(self.advanced(0, elapsed_s), skipped_steps=self.skipped_steps + 1)


def save_checkpoint(
    run: RunFolder,
    config: RunConfig,
    model: MethodModel,
    record: BaseRecord,
    optimiser: torch.optim.Optimizer,
    position: Position,
    contents: list[str],
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep_checkpoints`.

    Raises:
        PreservationError: a tensor of the base is not what it was; nothing is written then.
    """
    folder = run.checkpoint(position.step)
    with new_folder(folder) as partial:
        write_position(partial, config, model, record, position, contents)
        save_tensors(partial / _OPTIMISER, optimiser_tensors(optimiser, model))
    for old in checkpoints(run)[: -config.train.keep_checkpoints]:
        shutil.rmtree(old)
    return folder


def write_position(
    folder: Path,
    config: RunConfig,
    model: MethodModel,
    record: BaseRecord,
    position: Position,
    contents: list[str],
) -> None:
    """Write what a checkpoint and `final/` have in common, after checking the base's hashes.

    Raises:
        PreservationError: a tensor of the base is not what it was.
    """
    if isinstance(model, ScaleForCausalLM) and (changed := changed_tensors(model.base, record)):
        raise PreservationError(f"step {position.step}: the base has changed: {', '.join(changed[:3])}")
    write_trained(folder, model, config.method, record)
    write_json(folder / _POSITION, asdict(position))
    write_json(folder / CORPORA, contents)
    write_text(folder / "scale.yaml", dump_config(config))


def checkpoints(run: RunFolder) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(run.checkpoints.glob("step-*"))


def newest_whole_checkpoint(run: RunFolder) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is as it was written, and a line for every one that had to be skipped."""
    skipped = []
    for folder in reversed(checkpoints(run)):
        try:
            verify_folder(folder)
        except StorageError as error:
            skipped.append(f"checkpoint {folder.name} skipped: {error}")
        else:
            return folder, skipped
    return None, skipped


def read_position(folder: Path) -> Position:
    """Read how far the run in a checkpoint or in `final/` had come."""
    try:
        position = read_json(folder / _POSITION)
        return Position(**position)
    except TypeError:
        raise StorageError(f"{folder / _POSITION}: damaged, not a position") from None


def load_checkpoint(folder: Path, model: MethodModel, optimiser: torch.optim.Optimizer) -> Position:
    """Put a checkpoint's blocks and moments back, and return its position.

    Raises:
        StorageError: it is damaged.
    """
    verify_folder(folder)
    load_trained(model, folder)
    load_optimiser_tensors(optimiser, model, load_tensors(folder / _OPTIMISER))
    return read_position(folder)
