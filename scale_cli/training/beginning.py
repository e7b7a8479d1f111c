"""Where a run's first step goes on from: its own start, another run, or a checkpoint of its own.

A run with `train.init_from` is one of its own, with its own schedule and data, from step 0. Each of its folders says by
`init_from.json` what it began with; a resume needs nothing but them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from scale_cli.config.load import load_config
from scale_cli.config.same_run import BASE_KEYS, LOCATION_KEYS, TRAIN_SECTIONS, check_same_run, differences
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import check_same_stages
from scale_cli.errors import RunFolderError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import main_decides
from scale_cli.storage.atomic import changed_versions, read_json, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord, TrainState, read_corpora
from scale_cli.training.averaging import check_same_average
from scale_cli.training.checkpoint import branch_point_at, checkpoints, has_moments, newest_whole_checkpoint
from scale_cli.upscale.folder import MethodModel, read_method
from scale_cli.upscale.session import other_text_warnings

_SECTIONS = ("model", "method")
_PHASE = r"method\.elo\.phase"  # of which the alignment begins with what the layers' has trained


def starting_point(
    config: RunConfig, resume: str | None, log: Callable[[str], None], accepted: Collection[str]
) -> Path | None:
    """Return the checkpoint to go on from, or None for the beginning: looked at by one process, the same in all.

    Args:
        config: of the run.
        resume: None, `auto`, or a checkpoint's path.
        log: takes lines.
        accepted: keys that may differ from what the run was begun with.
    """
    run_folder = RunFolder(config.output_dir)

    def decided() -> int:
        """Return what the others are told: 0 for the beginning, else 1 + the steps done."""
        if (start := _found(run_folder, resume, log)) is not None:
            return 1 + _held_to(start, config, log, accepted)
        _check_beginning(config, log)
        return 0

    if not (number := main_decides(decided)):
        return None
    assert resume is not None  # or there is nothing to go on from
    return run_folder.checkpoint(number - 1) if resume == "auto" else Path(resume)


def is_longer(final: Path, config: RunConfig, accepted: Collection[str]) -> bool:
    """Return whether a finished run is to go on to more steps."""
    before = load_config(final / "scale.yaml").train.max_steps
    return "train.max_steps" in accepted and config.train.max_steps > before


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


def _held_to(start: Path, config: RunConfig, log: Callable[[str], None], accepted: Collection[str]) -> int:
    """Return the steps done by a checkpoint, which is refused where the run has become another since."""
    for line in check_same_run(start, config, TRAIN_SECTIONS, LOCATION_KEYS, accepted):
        log(f"changed        {line}")
    if (step := TrainState.load(start).step) > config.train.max_steps:
        raise RunFolderError(f"{start}: is beyond train.max_steps {config.train.max_steps}; give at least {step}")
    before = load_config(start / "scale.yaml")
    check_same_average(start, step, before.train, config.train)
    check_same_stages(start, step, before, config)
    log(f"resuming       {start}")
    if changed := changed_versions(start):
        log(f"warning: written by other versions, so the last bits may differ: {', '.join(changed)}")
    return step


def _check_beginning(config: RunConfig, log: Callable[[str], None]) -> None:
    """Refuse a `train.init_from` that does not fit; warn where layers, tokens or codes were found in other text."""
    for warning in other_text_warnings(config):
        log(f"warning: {warning}")
    check_init_from(config)
    if config.train.init_from is not None:
        folder = Path(config.train.init_from)
        check_same_start(folder, RunFolder(config.output_dir).upscaled)
        log(f"beginning      {folder}: {branch_point_at(folder, config.train.init_moments)}")


def check_init_from(config: RunConfig) -> None:
    """Refuse to begin with what is not whole, or was trained of another model or by another method.

    Nothing is asked of a run that has begun, or that begins with its own start.
    """
    run, train = RunFolder(config.output_dir), config.train
    if train.init_from is None or run.final.is_dir() or checkpoints(run):
        return
    folder, key = Path(train.init_from), f"train.init_from: {train.init_from}"
    if not TrainState.is_in(folder):
        raise RunFolderError(f"{key}: is neither a checkpoint of a run (checkpoints/step-...) nor its final/")
    verify_folder(folder)
    before = load_config(folder / "scale.yaml")
    if config.method.adept.layers is not None:  # those that a run has found are in the folder alone
        before = before.model_copy(update={"method": read_method(folder)})
    ignored_keys = rf"{BASE_KEYS}|{_PHASE}" if before.method.elo.phase == "layers" else BASE_KEYS
    if changed := differences(before, config, _SECTIONS, ignored_keys):
        raise RunFolderError(f"{key}: was trained with another model or method ({'; '.join(changed)})")
    if train.init_moments == "kept":
        if before.method.elo.phase != config.method.elo.phase:
            raise RunFolderError(f"{key}: has moments of ELO's two layers alone; set train.init_moments: fresh")
        if not has_moments(folder):
            raise RunFolderError(f"{key}: has no moments to keep; give a checkpoint, or train.init_moments: fresh")
        if before.train.optimiser != train.optimiser:
            raise RunFolderError(f"{key}: has moments of {before.train.optimiser}; set train.init_moments: fresh")


def check_same_start(folder: Path, upscaled: Path) -> None:
    """Hold what a run begins with to the base, the tokenizer and the copied layers of its own `upscaled/`."""
    theirs, ours = BaseRecord.load(folder), BaseRecord.load(upscaled)
    for what in ("content", "config", "tokenizer"):
        before, now = (getattr(record, f"{what}_sha256") for record in (theirs, ours))
        if before and now and before != now:
            subject = "tokenizer" if what == "tokenizer" else "base" if what == "content" else "base's config.json"
            raise RunFolderError(
                f"train.init_from: {folder}: its {subject} is not this run's (SHA-256 {before[:12]} -> {now[:12]})"
            )
    copied, found = (read_method(place).adept.layers for place in (folder, upscaled))
    if copied != found:
        raise RunFolderError(
            f"train.init_from: {folder}: copies the layers {copied}, and this run {found}, found on other text; name "
            "those in method.adept.layers"
        )


def adopt_rates(model: MethodModel, folder: Path) -> None:
    """Let the learning rates follow the size that E' had where its training began, also of a run in between."""
    if isinstance(model, ScaleForCausalLM):
        model.config.expansion_embedding_rms = read_json(folder / "config.json").get("expansion_embedding_rms")


def repetition_warnings(folder: Path, config: RunConfig, contents: list[str]) -> list[str]:
    """Return a warning where a run would begin with the very batches that what it begins with was trained on."""
    before = load_config(folder / "scale.yaml")
    same = before.seed == config.seed and before.corpus.sequence_length == config.corpus.sequence_length
    if not same or read_corpora(folder) != contents:
        return []
    return ["train.init_from: the same text with the same seed: its first batches come again; set another seed"]
