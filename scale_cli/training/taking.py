"""`final/` of a model that others trained: nothing trains, and its weights are copied."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from scale_cli.data.corpora import every_source, open_sources
from scale_cli.data.ledger import TrainedTokens
from scale_cli.errors import RunFolderError
from scale_cli.methods.given import ADAPTER_CONFIG, file_of
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.processes import device
from scale_cli.report import quantity
from scale_cli.runs.folder import TRAINED
from scale_cli.runs.opened import Run, open_folder
from scale_cli.storage.atomic import (
    claimed,
    load_tensors,
    new_folder,
    read_json,
    save_tensors,
)
from scale_cli.terminal import Log
from scale_cli.training.checkpoint import describe_trained
from scale_cli.training.records import Cost, TrainState
from scale_cli.upscale.base_files import looks_local
from scale_cli.upscale.base_hashes import record_base
from scale_cli.upscale.given_model import (
    beside_its_base,
    load_given,
    other_base,
    tokenizer_of_given,
)
from scale_cli.vocabulary.tokenizer import read_texts

_BYTES_COMPARED = 1 << 14  # of each text, by both tokenizers


def take(run: Run, log: Log) -> TrainState:
    """Write `final/`, or check that it holds the model that the config names now."""
    config = run.config
    name = config.method.model
    assert name is not None, "the schema asks a method that trains nothing for one"
    final = run.folder.final
    if final.is_dir() and looks_local(name) and not Path(name).exists():
        return _done_already(run, log)
    run.check(every_source(config))
    texts = read_texts(config.evaluation.perplexity, config.corpus, _BYTES_COMPARED)
    own = tokenizer_of_given(name, config.model, texts)
    given = beside_its_base(name, config.model.base)  # with the hash of its base, if it has one
    assert given is not None, "it has a base"
    streams = load_given(replace(given, base=config.model))
    trained = {
        key: weight.detach().contiguous()
        for key, weight in trainable_parameters(streams.trained).items()
    }
    settings = file_of(name, ADAPTER_CONFIG)
    if final.is_dir():
        held = load_tensors(open_folder(final, run).path / TRAINED)
        if (
            held.keys() != trained.keys()
            or any(not torch.equal(held[key], weight) for key, weight in trained.items())
            or (settings is not None and read_json(settings) != read_json(final / ADAPTER_CONFIG))
        ):
            raise RunFolderError(
                f"{final}: holds another model than {name} is now; choose another output_dir "
                "(--output)"
            )
        return _done_already(run, log)

    state = TrainState()
    record = record_base(streams.base, config.model, run.base_tokenizer)
    corpora = open_sources(config, config.corpus.sources, run.base_tokenizer)
    with claimed(run.folder.root), new_folder(final) as partial:
        describe_trained(
            partial,
            streams.trained,
            config,
            record,
            state=state,
            corpora=corpora,
            trained=[TrainedTokens(0, 0, 0)] * len(corpora),
        )
        if settings is not None:
            shutil.copyfile(settings, partial / ADAPTER_CONFIG)
        save_tensors(partial / TRAINED, trained)
        cost = Cost.of(streams.trained, state, device(), num_processes=1)
        cost.save(partial)
    if note := other_base(name, config.model):
        log(f"note           {note}")
    log(
        f"given          nothing trains: {quantity(cost.trainable_parameters)} parameters of {name} are in {final}"
    )
    if own.chat_template != run.base_tokenizer.chat_template and config.model.tokenizer is None:
        log(f"note           it has its own chat template; for that set model.tokenizer={name}")
    return state


def _done_already(run: Run, log: Log) -> TrainState:
    log(f"done already   {run.folder.final}")
    return TrainState.load(run.folder.final)
