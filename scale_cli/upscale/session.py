"""A trained model, opened: what every verb does after training begins with, so that all of them check the same.

Held to what was written: the files of its folder, the base tensor by tensor, the tokenizer, and, where a config asks
for the run, that config. It computes on the device of this process (`processes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.compare import BASE_KEYS, TRAIN_SECTIONS, check_same_run
from scale_cli.config.load import load_config
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.errors import RunFolderError
from scale_cli.processes import placed
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import BaseRecord
from scale_cli.upscale.base import check_tokenizer, load_tokenizer
from scale_cli.upscale.before_writing import check_before_writing
from scale_cli.upscale.folder import MethodModel, load_model
from scale_cli.upscale.method import set_router


@dataclass(frozen=True)
class Trained:
    """A model that was upscaled or trained."""

    folder: Path
    model: MethodModel  # on this process's device, in evaluation mode
    tokenizer: PreTrainedTokenizerBase
    record: BaseRecord  # of the base that it stands on


def open_trained(folder: Path, base: ModelConfig) -> Trained:
    """Open a method folder: `upscaled/`, a checkpoint, `final/` or an adapter.

    Args:
        folder: which one.
        base: where its base is.

    Raises:
        RunFolderError: the folder is not there.
        StorageError: it is damaged.
        BaseModelError: the base or its tokenizer is not at hand (ChangedBaseError: is another one).
    """
    model, tokenizer, record = load_model(folder, base), load_tokenizer(base), BaseRecord.load(folder)
    check_tokenizer(tokenizer, record)
    return Trained(folder, placed(model).eval(), tokenizer, record)


def check_run(config: RunConfig) -> RunFolder:
    """Check that a run has been trained, and with this config, before anything is loaded.

    Raises:
        RunFolderError: it has not.
        UsageError: something else that is certain to fail (`check_before_writing`).
    """
    run = RunFolder(config.output_dir)
    if not run.final.is_dir():
        raise RunFolderError(f"{run.final}: not there; run `scale train` first")
    check_same_run(run.final, load_config(run.final / "scale.yaml"), config, TRAIN_SECTIONS, BASE_KEYS)
    check_before_writing(config, config.evaluation.perplexity)
    return run


def open_final(run: RunFolder, config: RunConfig) -> Trained:
    """Open what a run, which `check_run` has found good, has trained, with the router that the config asks for now.

    Raises:
        StorageError: the folder is damaged.
        BaseModelError: the base or its tokenizer is not at hand (ChangedBaseError: is another one).
    """
    trained = open_trained(run.final, config.model)
    set_router(trained.model, config.method.router)
    return trained
