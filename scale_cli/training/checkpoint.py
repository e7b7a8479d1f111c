"""Checkpoints: their content, how they are loaded, and from which one a run continues.

A checkpoint is whole or absent. It is a method folder (`runs/method_folder.py`) and also has:

    optimiser.safetensors  the moments of every trainable parameter, and the tensors of hooks (`methods/recipes.py`)
    init_from.json         the folder of another run that the run began with (`train.init_from`)
    corpora.json           the content of every source, by hash
    position.json          step, tokens seen, where the time went
    token_ledger.json      per source: read, kept, dropped and why; trained, and left in the unfinished epoch
    scale.yaml             the resolved config

A sharded model's parameters and moments are in `shards/` instead, one file per process
(`storage/shards.py`). Either kind can be read by any number of processes, sharded or not.
`training/training_run.py` writes them.

A run begins from its own `upscaled/`, from another run, or from one of its own checkpoints. A run
with `train.init_from` is a new run, with its own schedule and data, from step 0. Each of its
folders names its beginning in `init_from.json`, so a resume does not need the other run's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from scale_cli.config.load import dump_config
from scale_cli.config.schema import (
    ACCEPTABLE,
    BASE_KEYS,
    FREE,
    LOCATION_KEYS,
    TRAIN_SECTIONS,
    RunConfig,
    differences,
)
from scale_cli.config.sources import CORPORA
from scale_cli.data.ledger import SourceTokens, TokenLedger, TrainedTokens
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import ConfigError, RunFolderError, StorageError
from scale_cli.methods.recipes import Hook, trainable_parameters
from scale_cli.processes import main_decides
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import describe_method, load_trained
from scale_cli.runs.opened import MethodFolder, Run
from scale_cli.storage.atomic import (
    MANIFEST,
    changed_versions,
    file_sha256,
    is_as_written,
    load_tensors,
    verify_folder,
    write_json,
    write_text,
)
from scale_cli.storage.shards import has_shards, load_shards
from scale_cli.terminal import Log
from scale_cli.training.optimiser import empty_optimiser_tensors, load_optimiser_tensors
from scale_cli.training.records import BranchPoint, TrainState
from scale_cli.training.sharding import is_sharded
from scale_cli.upscale.base_files import BaseRecord
from scale_cli.upscale.building import MethodModel

OPTIMISER = "optimiser.safetensors"


def describe_trained(
    folder: Path,
    model: MethodModel,
    config: RunConfig,
    record: BaseRecord,
    *,
    state: TrainState,
    corpora: Sequence[TokenisedCorpus],
    trained: Sequence[TrainedTokens],
) -> None:
    """Write the files that a checkpoint and `final/` share: everything but tensors."""
    describe_method(folder, model, config.method, record)
    state.save(folder)
    write_json(folder / CORPORA, [corpus.name for corpus in corpora])
    ledger = {
        source.name: SourceTokens(**vars(tokens), corpus=corpus.ledger)
        for source, corpus, tokens in zip(config.corpus.sources, corpora, trained, strict=True)
    }
    TokenLedger(ledger).save(folder)
    write_text(folder / "scale.yaml", dump_config(config))


def newest_whole_checkpoint(run: RunFolder) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint, and a line for every damaged one that was skipped."""
    skipped = []
    for folder in reversed(run.saved):
        try:
            verify_folder(folder)
        except StorageError as error:
            skipped.append(f"checkpoint {folder.name} skipped: {error}")
        else:
            return folder, skipped
    return None, skipped


def branch_point_at(folder: MethodFolder) -> BranchPoint:
    """Return the branch point of a run that begins with `folder`."""
    state = TrainState.load(folder.path)
    return BranchPoint(
        content_sha256=file_sha256(folder.path / MANIFEST),
        step=state.step,
        num_tokens=state.num_tokens,
    )


def load_checkpoint(
    checkpoint: MethodFolder,
    model: MethodModel,
    optimiser: torch.optim.Optimizer,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Load a verified checkpoint's parameters, moments and tensors of hooks; return its position."""
    folder = checkpoint.path
    state = TrainState.load(checkpoint.path)
    beside = [hook for hook in hooks if hook.keeps(state.step)]
    if is_sharded(model) or has_shards(folder):
        moments = dict(empty_optimiser_tensors(optimiser, model, beside))
        load_shards(folder, {**trainable_parameters(model), **moments})
    else:
        load_trained(model, folder)
        moments = load_tensors(folder / OPTIMISER)
    load_optimiser_tensors(optimiser, model, moments, beside)
    return state


def check_to_go_on(run: Run, resume: str | None, accepted: Collection[str]) -> None:
    """Raise an error, before any work, if the config has become that of another run.

    Under `auto` the run's newest folder that can be read tells: what is damaged is found when it is
    opened. Whatever `resume` is, keys that may not change are not accepted.
    """
    for key in accepted:
        if key not in ACCEPTABLE | FREE:
            may_change = ", ".join(sorted(ACCEPTABLE))
            raise ConfigError(
                f"--accept {key}: only these may change within a run: {may_change}; "
                "those that change no weights need no --accept"
            )
    begun_in = [run.folder.final, *reversed(run.folder.saved)]
    for path in begun_in if resume == "auto" else ():
        if is_as_written(path, "scale.yaml") and is_as_written(path, TrainState.FILE):
            _changes_since(MethodFolder(path, run), accepted)
            return


def _changes_since(begun: MethodFolder, accepted: Collection[str]) -> list[str]:
    """Return a line for every change of the config since a folder was written.

    RunFolderError: it has become that of another run.
    """
    run = begun.run
    changed = begun.check_same_run(TRAIN_SECTIONS, LOCATION_KEYS, accepted)
    step = TrainState.load(begun.path).step
    max_steps = run.config.train.max_steps
    if step > max_steps and begun.path != run.folder.final:
        raise RunFolderError(
            f"{begun.path}: is beyond train.max_steps {max_steps}; set it to at least {step}"
        )
    return changed


def starting_point(
    run: Run, resume: str | None, log: Log, accepted: Collection[str]
) -> MethodFolder | None:
    """Return the checkpoint to continue from, or None to begin; the main process decides for all.

    `resume` is None, `auto`, or a checkpoint's path; `accepted` keys may differ from the run's
    first config.
    """

    def decide() -> Path | None:
        ours = MethodFolder(run.folder.upscaled, run)
        if (start := _find(run.folder, resume, log)) is not None:
            _check_same_start("--resume", MethodFolder(start, run), ours)
            for line in _changes_since(MethodFolder(start, run), accepted):
                log(f"changed        {line}")
            log(f"resuming       {start}")
            if changed := changed_versions(start):
                words = "this checkpoint was written by other versions, so the last bits may differ"
                log(f"warning: {words}: {', '.join(changed)}")
            return start
        check_init_from(run)
        if (initialised_from := init_from(run)) is not None:
            _check_same_start("train.init_from", initialised_from, ours)
            log(f"beginning      {initialised_from.path}: {branch_point_at(initialised_from)}")
        return None

    start = main_decides(decide)
    return None if start is None else MethodFolder(start, run)


def _find(run_folder: RunFolder, resume: str | None, log: Log) -> Path | None:
    """Return the checkpoint that `--resume` means, verified; None if a run is to begin."""
    if resume == "auto":
        start, skipped = newest_whole_checkpoint(run_folder)
        for line in skipped:
            log(f"warning: {line}")
        if start is None and (skipped or run_folder.final.is_dir()):
            raise RunFolderError(
                f"{run_folder.checkpoints}: no checkpoint is whole; remove this folder and final/ to start over"
            )
        return start
    if run_folder.final.is_dir():
        raise RunFolderError(f"{run_folder.root}: holds a finished run; choose another output_dir")
    if resume is None:
        if run_folder.saved:
            raise RunFolderError(
                f"{run_folder.root}: holds an unfinished run; continue it with --resume auto"
            )
        return None
    start = Path(resume)
    if not TrainState.is_in(start):
        raise RunFolderError(f"--resume {resume}: not a checkpoint folder")
    if newer := [
        f.name for f in run_folder.saved if TrainState.load(f).step > TrainState.load(start).step
    ]:
        raise RunFolderError(
            f"--resume {resume}: {run_folder.checkpoints} holds newer ones; remove {', '.join(newer)}"
        )
    verify_folder(start)
    return start


def init_from(run: Run) -> MethodFolder | None:
    """Return the folder of another run that this one begins with, if any."""
    train = run.config.train
    return None if train.init_from is None else MethodFolder(Path(train.init_from), run)


def check_init_from(run: Run) -> None:
    """Raise an error if `train.init_from` is not whole, or is of another model or method.

    A run that has begun, or has no `train.init_from`, is not checked.
    """
    config = run.config
    train = run.config.train
    initialised_from = init_from(run)
    if initialised_from is None or run.folder.final.is_dir() or run.folder.saved:
        return
    key = f"train.init_from: {train.init_from}"
    if not TrainState.is_in(initialised_from.path):
        raise RunFolderError(
            f"{key}: is neither a checkpoint (checkpoints/step-...) nor the final/ of a run"
        )
    verify_folder(initialised_from.path)
    if changed := differences(initialised_from.config, config, ("model", "method"), BASE_KEYS):
        raise RunFolderError(
            f"{key}: was trained with another model or method ({'; '.join(changed)})"
        )


def _check_same_start(given_by: str, begun: MethodFolder, ours: MethodFolder) -> None:
    """Raise RunFolderError if a folder, given by a key or option, has another base or tokenizer than the run's own
    `upscaled/`.
    """
    subjects = {"content": "base", "config": "base's config.json", "tokenizer": "tokenizer"}
    for what, subject in subjects.items():
        before, now = (getattr(folder.record, f"{what}_sha256") for folder in (begun, ours))
        if before and now and before != now:
            raise RunFolderError(
                f"{given_by}: {begun.path}: its {subject} is not this run's "
                f"(SHA-256 {before[:12]} -> {now[:12]})"
            )
