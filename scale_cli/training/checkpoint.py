"""Checkpoints: what trains, the optimiser, and the position, each whole or absent.

A checkpoint is a method folder (`upscale/folder.py`) and beside it

    optimiser.safetensors  the moments of every trainable parameter
    position.json          step, tokens seen, seconds trained
    token_ledger.json      of every source: read, kept, dropped and why; trained, and held over in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments lie in `shards/` instead, one file a process (`storage/shards.py`). Either
kind is read by any number of processes, sharded or not.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from scale_cli.config.load import dump_config
from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import Batches
from scale_cli.data.ledger import Ledger
from scale_cli.errors import PreservationError, StorageError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import (
    load_tensors,
    new_folder,
    partial_folder,
    read_json,
    save_tensors,
    verify_folder,
    write_json,
    write_text,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.shards import has_shards, load_shards, save_shards
from scale_cli.training.optimiser import (
    empty_optimiser_tensors,
    load_optimiser_tensors,
    optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.sharding import changed_parts, is_sharded
from scale_cli.upscale.base import BaseRecord, changed_tensors
from scale_cli.upscale.folder import TRAINED, MethodModel, describe_method, load_trained

_OPTIMISER = "optimiser.safetensors"
_POSITION = "position.json"
CORPORA = "corpora.json"
TOKEN_LEDGER = "token_ledger.json"


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Args:
        step: optimiser steps done.
        num_tokens: target tokens trained on.
        elapsed_s: seconds of training, over all resumes.
        skipped_steps: of the steps done, those left out because their loss or gradient was not finite.
        skipped_tokens: the target tokens of those.
    """

    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    skipped_steps: int = 0
    skipped_tokens: int = 0

    def advanced(self, num_tokens: int, elapsed_s: float) -> Position:
        """Return the position one step on."""
        return replace(self, step=self.step + 1, num_tokens=self.num_tokens + num_tokens, elapsed_s=elapsed_s)

    def skipped(self, num_tokens: int, elapsed_s: float) -> Position:
        """Return the position one step on, that step left out."""
        return replace(
            self.advanced(0, elapsed_s),
            skipped_steps=self.skipped_steps + 1,
            skipped_tokens=self.skipped_tokens + num_tokens,
        )


@dataclass(frozen=True)
class Origin:
    """Where a run comes from: what each of its folders says of it.

    Args:
        config: the resolved config.
        record: the base's hashes.
        contents: what names the content of every training corpus; a resume is held to it.
        base_parts: hashes of what this process holds of a sharded base; empty where it is not sharded.
        ledgers: what was read of every training corpus, and what became of it.
        batches: of the whole run; they tell what of it has been trained.
    """

    config: RunConfig
    record: BaseRecord
    contents: list[str]
    base_parts: dict[str, str]
    ledgers: list[Ledger]
    batches: Batches

    def token_ledger(self, num_steps: int) -> dict[str, Any]:
        """Return, for every source, what was read, and what the first steps have trained and left for later."""
        trained = self.batches.trained_tokens(num_steps)
        names = [source.name for source in self.config.corpus.sources]
        return {
            name: {"corpus": ledger.to_json(), **asdict(tokens)}
            for name, ledger, tokens in zip(names, self.ledgers, trained, strict=True)
        }


def save_checkpoint(
    origin: Origin,
    accelerator: Accelerator,
    model: MethodModel,
    optimiser: torch.optim.Optimizer,
    position: Position,
) -> None:
    """Write a checkpoint, then delete all but the newest `keep_checkpoints`; every process has to call this.

    Raises:
        PreservationError: a tensor of the base is not what it was; nothing is written then.
    """
    run = RunFolder(origin.config.output_dir)
    folder = run.checkpoint(position.step)
    check_base(origin, accelerator, model, position)
    tensors, moments = trainable_parameters(model), optimiser_tensors(optimiser, model)
    if is_sharded(model):
        with _folder_of_all(folder, accelerator) as partial:
            if accelerator.is_main_process:
                describe_run(partial, origin, model, position)
            save_shards(partial, {**tensors, **moments})
    elif accelerator.is_main_process:
        with new_folder(folder) as partial:
            describe_run(partial, origin, model, position)
            save_tensors(partial / TRAINED, tensors)
            save_tensors(partial / _OPTIMISER, moments)
    if accelerator.is_main_process:
        for old in checkpoints(run)[: -origin.config.train.keep_checkpoints]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


@contextmanager
def _folder_of_all(path: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield one folder to every process, to be filled together: `new_folder` for all of them.

    Args:
        path: on a file system that every process sees.
        accelerator: processes.
    """
    with new_folder(path) if accelerator.is_main_process else nullcontext(partial_folder(path)) as partial:
        accelerator.wait_for_everyone()  # the folder is there
        yield partial
        accelerator.wait_for_everyone()  # every file is


def check_base(origin: Origin, accelerator: Accelerator, model: MethodModel, position: Position) -> None:
    """Check a widened model's base against its hashes: a sharded one in parts, any other on the main process.

    Raises:
        PreservationError: a tensor of the base is not what it was.
    """
    if not isinstance(model, ScaleForCausalLM):
        return
    changed: list[str] = []
    if origin.base_parts:
        changed = changed_parts(model.base, origin.base_parts)
    elif accelerator.is_main_process:
        changed = changed_tensors(model.base, origin.record)
    if changed:
        raise PreservationError(f"step {position.step}: the base has changed: {', '.join(changed[:3])}")


def describe_run(folder: Path, origin: Origin, model: MethodModel, position: Position) -> None:
    """Write what a checkpoint and `final/` have in common: everything but tensors."""
    describe_method(folder, model, origin.config.method, origin.record)
    write_json(folder / _POSITION, asdict(position))
    write_json(folder / CORPORA, origin.contents)
    write_json(folder / TOKEN_LEDGER, origin.token_ledger(position.step))
    write_text(folder / "scale.yaml", dump_config(origin.config))


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
    if is_sharded(model) or has_shards(folder):
        moments = empty_optimiser_tensors(model)
        load_shards(folder, {**trainable_parameters(model), **moments})
    else:
        load_trained(model, folder)
        moments = load_tensors(folder / _OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments)
    return read_position(folder)
