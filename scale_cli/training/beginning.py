"""Where a run's first step goes on from: its own start, another run, or a checkpoint of its own.

A run with `train.init_from` is one of its own, with its own schedule and data, from step 0. Each of its folders says by
`init_from.json` what it began with; a resume needs nothing but them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from scale_cli.config.same_run import BASE_KEYS, LOCATION_KEYS, TRAIN_SECTIONS, differences
from scale_cli.config.training import TrainConfig
from scale_cli.data.corpora import check_same_stages
from scale_cli.errors import RunFolderError
from scale_cli.methods.recipes import first_averaged
from scale_cli.processes import main_decides
from scale_cli.storage.atomic import changed_versions, read_json, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import TrainState, read_corpora
from scale_cli.training.checkpoint import branch_point_at, checkpoints, has_moments, newest_whole_checkpoint
from scale_cli.upscale.folder import MethodModel
from scale_cli.upscale.run import MethodFolder, Run

_SECTIONS = ("model", "method")


def starting_point(
    run: Run, resume: str | None, log: Callable[[str], None], accepted: Collection[str]
) -> MethodFolder | None:
    """Return the checkpoint to go on from, or None for the beginning: looked at by one process, the same in all.

    Args:
        run: that is trained.
        resume: None, `auto`, or a checkpoint's path.
        log: takes lines.
        accepted: keys that may differ from what the run was begun with.
    """

    def decided() -> int:
        """Return what the others are told: 0 for the beginning, else 1 + the steps done."""
        if (start := _found(run.folder, resume, log)) is not None:
            return 1 + _held_to(MethodFolder(start, run), log, accepted)
        _check_beginning(run, log)
        return 0

    if not (number := main_decides(decided)):
        return None
    assert resume is not None  # or there is nothing to go on from
    return MethodFolder(run.folder.checkpoint(number - 1) if resume == "auto" else Path(resume), run)


def _found(run_folder: RunFolder, resume: str | None, log: Callable[[str], None]) -> Path | None:
    """Return the checkpoint that `--resume` means, read through; None where a run is to begin."""
    if resume != "auto" and run_folder.final.is_dir():
        raise RunFolderError(f"{run_folder.root}: holds a finished run; choose another output_dir")
    if resume is None:
        if checkpoints(run_folder):
            raise RunFolderError(f"{run_folder.root}: holds an unfinished run; continue it with --resume auto")
        return None
    if resume == "auto":
        start, skipped = newest_whole_checkpoint(run_folder)
        for line in skipped:
            log(f"warning: {line}")
        if start is None and run_folder.final.is_dir():
            raise RunFolderError(f"{run_folder.checkpoints}: no whole checkpoint to go on from")
        if start is None and skipped:
            raise RunFolderError(f"{run_folder.checkpoints}: no checkpoint is whole; remove them to start over")
        return start
    start = Path(resume)
    if not TrainState.is_in(start):
        raise RunFolderError(f"--resume {resume}: not a checkpoint folder")
    if newer := [f.name for f in checkpoints(run_folder) if TrainState.load(f).step > TrainState.load(start).step]:
        raise RunFolderError(f"--resume {resume}: {run_folder.checkpoints} holds newer ones: remove {', '.join(newer)}")
    verify_folder(start)
    return start


def _held_to(start: MethodFolder, log: Callable[[str], None], accepted: Collection[str]) -> int:
    """Return the steps done by a checkpoint, which is refused where the run has become another since."""
    path, config = start.path, start.run.config
    for line in start.check_same_run(TRAIN_SECTIONS, LOCATION_KEYS, accepted):
        log(f"changed        {line}")
    if (step := start.state.step) > config.train.max_steps:
        raise RunFolderError(f"{path}: is beyond train.max_steps {config.train.max_steps}; give at least {step}")
    check_same_average(path, step, start.config.train, config.train)
    check_same_stages(path, step, start.config, config)
    log(f"resuming       {path}")
    if changed := changed_versions(path):
        log(f"warning: written by other versions, so the last bits may differ: {', '.join(changed)}")
    return step


def _check_beginning(run: Run, log: Callable[[str], None]) -> None:
    """Refuse a `train.init_from` that does not fit; warn where layers, tokens or codes were found in other text."""
    for warning in run.other_text_warnings():
        log(f"warning: {warning}")
    check_init_from(run)
    if (theirs := init_from(run)) is not None:
        check_same_start(theirs, MethodFolder(run.folder.upscaled, run))
        log(f"beginning      {theirs.path}: {branch_point_at(theirs, run.config.train.init_moments)}")


def init_from(run: Run) -> MethodFolder | None:
    """Return what another run has trained that this one begins with, if any."""
    train = run.config.train
    return None if train.init_from is None else MethodFolder(Path(train.init_from), run)


def check_init_from(run: Run) -> None:
    """Refuse to begin with what is not whole, or was trained of another model or by another method.

    Nothing is asked of a run that has begun, or that begins with its own start.
    """
    config, train, theirs = run.config, run.config.train, init_from(run)
    if theirs is None or run.folder.final.is_dir() or checkpoints(run.folder):
        return
    key = f"train.init_from: {train.init_from}"
    if not TrainState.is_in(theirs.path):
        raise RunFolderError(f"{key}: is neither a checkpoint of a run (checkpoints/step-...) nor its final/")
    verify_folder(theirs.path)
    before = theirs.config
    if not config.method.definition.probe_windows(config.method.settings):  # what a run has found is in the folder
        before = before.model_copy(update={"method": theirs.method})
    if changed := differences(before, config, _SECTIONS, BASE_KEYS):
        raise RunFolderError(f"{key}: was trained with another model or method ({'; '.join(changed)})")
    if train.init_moments == "kept":
        if not has_moments(theirs.path):
            raise RunFolderError(f"{key}: has no moments to keep; give a checkpoint, or train.init_moments: fresh")
        if before.train.optimiser != train.optimiser:
            raise RunFolderError(f"{key}: has moments of {before.train.optimiser}; set train.init_moments: fresh")


def check_same_start(theirs: MethodFolder, ours: MethodFolder) -> None:
    """Hold what a run begins with to the base, the tokenizer and the copied layers of its own `upscaled/`."""
    for what in ("content", "config", "tokenizer"):
        before, now = (getattr(folder.record, f"{what}_sha256") for folder in (theirs, ours))
        if before and now and before != now:
            subject = "tokenizer" if what == "tokenizer" else "base" if what == "content" else "base's config.json"
            raise RunFolderError(
                f"train.init_from: {theirs.path}: its {subject} is not this run's (SHA-256 {before[:12]} -> {now[:12]})"
            )
    theirs_found, ours_found = (of.method.definition.found(of.method.settings) for of in (theirs, ours))
    if theirs_found != ours_found:
        raise RunFolderError(
            f"train.init_from: {theirs.path}: {theirs_found}; in this run, found on other text, {ours_found}; name the "
            f"first in method.{ours.method.definition.section}"
        )


def adopt_rates(model: MethodModel, folder: Path) -> None:
    """Let the learning rates follow the size that E' had where its training began, also of a run in between."""
    if hasattr(model.config, "expansion_embedding_rms"):
        model.config.expansion_embedding_rms = read_json(folder / "config.json").get("expansion_embedding_rms")


def repetition_warnings(theirs: MethodFolder, contents: list[str]) -> list[str]:
    """Return a warning where a run would begin with the very batches that what it begins with was trained on."""
    before, config = theirs.config, theirs.run.config
    same = before.seed == config.seed and before.corpus.sequence_length == config.corpus.sequence_length
    if not same or read_corpora(theirs.path) != contents:
        return []
    return ["train.init_from: the same text with the same seed: its first batches come again; set another seed"]


def check_same_average(where: Path, step: int, before: TrainConfig, now: TrainConfig) -> None:
    """Refuse to go on with an average that has begun at another step, which a change of `max_steps` may ask for."""
    begins = first_averaged(now)
    if begins is not None and first_averaged(before) != begins < step:
        least = f"give at least train.max_steps={step + now.averaged_steps}, or an earlier checkpoint"
        raise RunFolderError(f"{where}: train.average: its steps, from {begins + 1} on, were not averaged; {least}")
