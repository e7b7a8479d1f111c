"""Checkpoints: what trains, the optimiser, and where the run stands, each whole or absent.

A checkpoint is a method folder (`upscale/folder.py`) and beside it

    optimiser.safetensors  the moments of every trainable parameter, its average (`train.average`) and slow weights
                           (`train.lookahead`)
    init_from.json         what the run began with, where that was trained by another run (`train.init_from`)
    corpora.json           what was read of every source, by hash
    position.json          step, tokens seen, where the time went
    token_ledger.json      of every source: read, kept, dropped and why; trained, and held over in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments lie in `shards/` instead, one file a process (`storage/shards.py`). Either
kind is read by any number of processes, sharded or not. When and on which thread: `training/saving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from scale_cli.config.load import dump_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.data.ledger import Ledger, SourceTokens, TokenLedger
from scale_cli.errors import PreservationError, StorageError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import is_main
from scale_cli.storage.atomic import (
    MANIFEST,
    file_sha256,
    load_tensors,
    new_folder,
    partial_folder,
    remove_folder,
    save_tensors,
    verify_folder,
    write_json,
    write_text,
)
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import CORPORA, TRAINED, BaseRecord, BranchPoint, TrainState
from scale_cli.storage.shards import has_shards, load_shards, save_shards
from scale_cli.training.anchors import SLOW, keeps_slow_weights
from scale_cli.training.averaging import AVERAGE, first_averaged
from scale_cli.training.optimiser import (
    empty_optimiser_tensors,
    load_optimiser_tensors,
    optimiser_tensors,
    trainable_parameters,
)
from scale_cli.training.sharding import changed_parts, is_sharded
from scale_cli.upscale.base import changed_tensors
from scale_cli.upscale.folder import MethodModel, describe_method, load_trained
from scale_cli.upscale.tokenizer import copy_grown_tokenizer

_OPTIMISER = "optimiser.safetensors"


@dataclass(frozen=True)
class RunMetadata:
    """Where a run comes from: what each of its folders says of it."""

    config: RunConfig  # the resolved config
    method: MethodConfig  # its method, and what was found to upscale
    record: BaseRecord  # the base's hashes
    contents: list[str]  # what names the content of every training corpus; a resume is held to it
    base_parts: dict[str, str]  # hashes of what this process holds of a sharded base; empty where it is not sharded
    ledgers: list[Ledger]  # what was read of every training corpus, and what became of it
    batches: Batches  # of the whole run; they tell what of it has been trained
    branch_point: BranchPoint | None = None  # what it began with, where another run had trained that

    def token_ledger(self, num_steps: int) -> TokenLedger:
        """Return, for every source, what was read, and what the first steps have trained and left for later."""
        trained = self.batches.trained_tokens(num_steps)
        names = [source.name for source in self.config.corpus.sources]
        return TokenLedger(
            {
                name: SourceTokens(**vars(tokens), corpus=ledger)
                for name, ledger, tokens in zip(names, self.ledgers, trained, strict=True)
            }
        )


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, as it was at one instant: copies, so that training may go on."""

    state: TrainState  # where the run stood
    trained: dict[str, Tensor]  # every parameter that trains, on the CPU
    moments: dict[str, Tensor]  # the optimiser's, on the CPU


def take_snapshot(model: MethodModel, optimiser: torch.optim.Optimizer, state: TrainState) -> Snapshot:
    """Copy what a checkpoint of a model that is not sharded has to hold."""
    return Snapshot(state, _copied(trainable_parameters(model)), _copied(optimiser_tensors(optimiser, model)))


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_checkpoint(metadata: RunMetadata, model: MethodModel, snapshot: Snapshot) -> None:
    """Write a snapshot as a checkpoint, then delete the oldest; on any thread of a process, while the model trains."""
    run, step = RunFolder(metadata.config.output_dir), snapshot.state.step
    with _beside_the_training_stream(model.device):
        check_base(metadata, model, step)
    _remove_unfit(run.checkpoint(step))
    with new_folder(run.checkpoint(step)) as partial:
        describe_run(partial, metadata, model, snapshot.state)
        save_tensors(partial / TRAINED, snapshot.trained)
        save_tensors(partial / _OPTIMISER, snapshot.moments)
    _remove_old_checkpoints(run, snapshot.state, metadata.config.train.keep_checkpoints)


def _beside_the_training_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Let copies from a GPU not wait for the steps under way, nor those for them: what is frozen needs no order."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def write_sharded_checkpoint(
    metadata: RunMetadata,
    accelerator: Accelerator,
    model: MethodModel,
    optimiser: torch.optim.Optimizer,
    state: TrainState,
) -> None:
    """Write a sharded model's checkpoint, then delete the oldest; every process has to call this, between two steps."""
    run = RunFolder(metadata.config.output_dir)
    check_base(metadata, model, state.step)
    tensors, moments = trainable_parameters(model), optimiser_tensors(optimiser, model)
    if accelerator.is_main_process:
        _remove_unfit(run.checkpoint(state.step))
    with _folder_of_all(run.checkpoint(state.step), accelerator) as partial:
        if accelerator.is_main_process:
            describe_run(partial, metadata, model, state)
        save_shards(partial, {**tensors, **moments})
    if accelerator.is_main_process:
        _remove_old_checkpoints(run, state, metadata.config.train.keep_checkpoints)
    accelerator.wait_for_everyone()


def _remove_unfit(folder: Path) -> None:
    """Remove what is where a checkpoint goes, where it is so damaged that nobody could tell it was one."""
    if folder.is_dir() and not (folder / MANIFEST).is_file():
        remove_folder(folder)


def _remove_old_checkpoints(run: RunFolder, newest: TrainState, num_kept: int) -> None:
    """Remove all but the newest and the best.

    One of a later step is a damaged one that a resume has skipped, and does not count.
    """
    best_step = None if newest.best is None else newest.best.step
    for old in [folder for folder in checkpoints(run) if step_of(folder) <= newest.step][:-num_kept]:
        if step_of(old) != best_step:
            remove_folder(old)


@contextmanager
def _folder_of_all(path: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Yield one folder to every process, to be filled together: `new_folder` for all of them."""
    with new_folder(path) if accelerator.is_main_process else nullcontext(partial_folder(path)) as partial:
        accelerator.wait_for_everyone()  # the folder is there
        yield partial
        accelerator.wait_for_everyone()  # every file is


def check_base(metadata: RunMetadata, model: MethodModel, step: int) -> None:
    """Check a widened model's base against its hashes: a sharded one in parts, any other on the main process."""
    if not isinstance(model, ScaleForCausalLM):
        return  # it has no such base
    if metadata.base_parts:
        changed = changed_parts(model.base, metadata.base_parts)
    else:
        changed = changed_tensors(model.base, metadata.record) if is_main() else []
    if changed:
        raise PreservationError(f"step {step}: the base has changed: {', '.join(changed[:3])}")


def describe_run(folder: Path, metadata: RunMetadata, model: MethodModel, state: TrainState) -> None:
    """Write what a checkpoint and `final/` have in common: everything but tensors."""
    describe_method(folder, model, metadata.method, metadata.record)
    copy_grown_tokenizer(metadata.config, folder)
    state.save(folder)
    write_json(folder / CORPORA, metadata.contents)
    if metadata.branch_point is not None:
        metadata.branch_point.save(folder)
    metadata.token_ledger(state.step).save(folder)
    write_text(folder / "scale.yaml", dump_config(metadata.config))


def checkpoints(run: RunFolder) -> list[Path]:
    """Return the checkpoints of a run, oldest first; folders of any other name are somebody else's."""
    folders = [folder for folder in run.checkpoints.glob("step-*") if folder.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


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


def branch_point_at(folder: Path, moments: str) -> BranchPoint:
    """Return what a run begins with, of the folder that it begins with."""
    state = TrainState.load(folder)
    return BranchPoint(file_sha256(folder / MANIFEST), state.step, state.num_tokens, moments)


def has_moments(folder: Path) -> bool:
    """Return whether an optimiser's moments are in a folder: a checkpoint has them, `final/` has not."""
    return (folder / _OPTIMISER).is_file() or has_shards(folder)


def load_checkpoint(
    folder: Path, model: MethodModel, optimiser: torch.optim.Optimizer, train: TrainConfig | None
) -> TrainState:
    """Put a checkpoint's blocks and moments back, and return its position; that it is whole is known by now.

    Args:
        folder: the checkpoint.
        model: gets its parameters.
        optimiser: gets its moments.
        train: the checkpoint's own settings, or those of the run that goes on (a longer one may begin its average
            later), which say what is taken up beside the moments; None: another run, which begins without.
    """
    state = TrainState.load(folder)
    beside = [] if train is None else _kept_beside_moments(train, state.step)
    if is_sharded(model) or has_shards(folder):
        moments = empty_optimiser_tensors(model, *beside)
        load_shards(folder, {**trainable_parameters(model), **moments})
    else:
        load_trained(model, folder)
        moments = load_tensors(folder / _OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments, *beside)
    return state


def _kept_beside_moments(train: TrainConfig, step: int) -> list[str]:
    """Return the names of what is kept of every parameter beside its moments: an average only where it goes on."""
    begins = first_averaged(train)
    averages = [AVERAGE] if begins is not None and step > begins else []
    return [*averages, SLOW] if keeps_slow_weights(train, step) else averages
