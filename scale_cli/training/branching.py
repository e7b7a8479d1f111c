"""`train.init_from`: a run whose first step goes on from what another run has trained.

The run is one of its own, with its own schedule and data, from step 0. Each of its folders says by `init_from.json`
what it began with; a resume needs nothing but them.
"""

from __future__ import annotations

from pathlib import Path

from scale_cli.config.load import load_config
from scale_cli.config.same_run import BASE_KEYS, differences
from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.storage.atomic import read_json, verify_folder
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord, TrainState, read_corpora
from scale_cli.training.checkpoint import checkpoints, has_moments
from scale_cli.upscale.folder import MethodModel, read_method

_SECTIONS = ("model", "method")
_PHASE = r"method\.elo\.phase"  # of which the alignment begins with what the layers' has trained


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
