"""A run, opened: what every verb begins with, so that all of them check the same.

| opened by     | what                                    | is held to its                    |
|---------------|-----------------------------------------|-----------------------------------|
| `open_start`  | `upscaled/`, to be trained              | files, tokenizer and config       |
| `open_final`  | `final/`, to be measured or exported    | the same                          |
| `open_folder` | any method folder, wherever it lies     | files and tokenizer               |

The base is held to its hashes, tensor by tensor, when the model is loaded. What can be known before a verb writes
anything is found by `check_before_writing`: no weight is loaded and no text is read, so it takes a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from scale_cli.config.same_run import BASE_KEYS, TRAIN_SECTIONS, UPSCALE_SECTIONS, check_same_run
from scale_cli.config.schema import ModelConfig, RouterConfig, RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.corpora import cache_dir
from scale_cli.data.documents import check_source
from scale_cli.data.tokens import DocumentMarkers, content_name
from scale_cli.errors import BaseModelError, ConfigError, RunFolderError
from scale_cli.processes import placed
from scale_cli.storage.atomic import verify_folder
from scale_cli.storage.layout import RunFolder, check_folder
from scale_cli.storage.records import CORPORA, BaseRecord, read_corpora
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.folder import MethodModel, any_base_without_weights, load_onto_base
from scale_cli.upscale.method import build_model, set_router
from scale_cli.upscale.sizes import check_context, check_processes
from scale_cli.upscale.tokenizer import check_tokenizer, check_tokenizer_fits, learned_on, load_tokenizer, tokenizer_of


@dataclass(frozen=True)
class Session:
    """A method folder that was found good; its model is loaded when it is asked for."""

    folder: Path
    base: ModelConfig  # where its base is
    tokenizer: PreTrainedTokenizerBase
    record: BaseRecord  # of the base that it stands on
    router: RouterConfig | None = None  # that a widened model gets; None: the one in the folder

    def load(self) -> MethodModel:
        """Return the model in evaluation mode, on this process's device."""
        model = placed(load_onto_base(self.folder, self.base))
        if self.router is not None:
            set_router(model, self.router)
        return model

    def load_to_train(self, seed: int) -> MethodModel:
        """Return the model where it was read to, to be placed or sharded; a baseline's start is drawn by the seed."""
        return load_onto_base(self.folder, self.base, seed)


def open_folder(folder: Path, base: ModelConfig, router: RouterConfig | None = None) -> Session:
    """Open a method folder: `upscaled/`, a checkpoint, `final/` or an adapter.

    BaseModelError says that the base or its tokenizer is not at hand; ChangedBaseError, that it is another.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder; run the verb that makes it first")
    verify_folder(folder)
    load_base_config(base)
    tokenizer, record = tokenizer_of(folder, base), BaseRecord.load(folder)
    check_tokenizer(tokenizer, record)
    return Session(folder, base, tokenizer, record, router)


def open_start(config: RunConfig) -> Session:
    """Open what a run begins with, made with this config."""
    session = open_folder(RunFolder(config.output_dir).upscaled, config.model)
    check_same_run(session.folder, config, UPSCALE_SECTIONS, BASE_KEYS)
    return session


def open_final(config: RunConfig) -> Session:
    """Open what a run has trained, with this config, and with the router that it asks for now."""
    final = RunFolder(config.output_dir).final
    if not final.is_dir():
        raise RunFolderError(f"{final}: not there; run `scale train` first")
    check_same_run(final, config, TRAIN_SECTIONS, BASE_KEYS)
    check_before_writing(config, config.evaluation.perplexity)
    return replace(open_folder(final, config.model), router=config.method.router)


def check_before_writing(config: RunConfig, sources: Sequence[TextSource], num_processes: int = 1) -> None:
    """Refuse what is certain to fail later on: a place, a base, sizes, or one of the `sources` that will be read."""
    RunFolder(config.output_dir).check()
    if config.corpus.cache_dir is not None and not config.corpus.cache_dir.is_dir():
        check_folder("corpus.cache_dir", config.corpus.cache_dir)
    base = any_base_without_weights(config.model)
    vocab_size = base.config.vocab_size
    check_context(config, base.config)
    check_processes(config.train, num_processes)
    with torch.device("meta"):
        build_model(base, config.method, config.seed)
    tokenizer = load_tokenizer(config.model)
    check_tokenizer_fits(tokenizer, config.model, vocab_size)
    if config.corpus.isolate_documents and DocumentMarkers.of(tokenizer).context is None:
        raise BaseModelError(
            f"corpus.isolate_documents: the tokenizer of {config.model.base} has neither BOS nor EOS, so a document's "
            "first token would be predicted from the document before"
        )
    for source in sources:
        if source.messages_field is not None and not tokenizer.chat_template:
            raise ConfigError(
                f"{source.name}: messages_field: the tokenizer of {config.model.base} has no chat template"
            )
        check_source(source)


def text_to_find_in(config: RunConfig) -> list[str]:
    """Return what names every source in which layers, tokens or codes are found, by its content; often none."""
    method = config.method
    read = learned_on(config) if method.vocabulary is not None and method.vocabulary.folder is None else []
    if method.counts_text:
        read += [source for source in config.corpus.new if source not in read]
    if method.variant == "adept" and method.adept.layers is None:
        read += [source for source in config.corpus.replay if source not in read]
    if not read:
        return []
    tokenizer = load_tokenizer(config.model)
    return [content_name(source, tokenizer, cache_dir(config), config.corpus) for source in read]


def other_text_warnings(config: RunConfig) -> list[str]:
    """Return a line where what a run begins with was found in other text than its config names now."""
    upscaled = RunFolder(config.output_dir).upscaled
    if not (upscaled / CORPORA).is_file():  # nothing was looked for, or by an earlier version
        return []
    before, now = read_corpora(upscaled), text_to_find_in(config)
    gone, come = [name for name in before if name not in now], [name for name in now if name not in before]
    if not gone and not come:
        return []
    return [
        f"{upscaled}: its layers, tokens or codes were found in other text: {', '.join(gone) or 'none'} -> "
        f"{', '.join(come) or 'none'} (a source and its hash); they stay, and `scale upscale` finds them anew"
    ]
