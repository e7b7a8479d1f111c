"""The corpora a config names, opened: training batches and held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusConfig, TextSource
from scale_cli.data.batches import Batches, IsolatedWindows, PackedWindows, Windows
from scale_cli.data.encoding import Ids
from scale_cli.data.selection import ChosenWindows, Scores, chosen_windows
from scale_cli.data.tokens import TokenisedCorpus, already_tokenised, tokenised
from scale_cli.errors import CorpusError, RunFolderError
from scale_cli.processes import is_main
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import read_corpora

# Tokens of which the neighbours are counted: they and their pairs are held in memory.
_NUM_COUNTED = 2**24


def cache_dir(config: RunConfig) -> Path:
    """Return where tokenised corpora lie."""
    return config.corpus.cache_dir or RunFolder(config.output_dir).tokens


def training_sources(config: RunConfig) -> list[TextSource]:
    """Return every source that training reads: what is trained on, and what is scored on the way."""
    return [*config.corpus.sources, *(config.evaluation.perplexity if config.train.eval_every_steps else ())]


def every_source(config: RunConfig) -> list[TextSource]:
    """Return every source of a config, trained on or held out."""
    return [*config.corpus.sources, *config.evaluation.perplexity]


def open_sources(
    config: RunConfig, sources: Sequence[TextSource], tokenizer: PreTrainedTokenizerBase
) -> list[TokenisedCorpus]:
    """Open some sources of a config, tokenising what the cache does not hold."""
    folder = cache_dir(config)
    return [tokenised(source, tokenizer, folder, show_progress=is_main(), reading=config.corpus) for source in sources]


def held_out_in_cache(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[TokenisedCorpus | None]:
    """Open every evaluation source that the cache holds; None for the others, and for those that are not there."""
    folder = cache_dir(config)
    corpora: list[TokenisedCorpus | None] = []
    for source in config.evaluation.perplexity:
        corpora.append(None)
        if any(folder.glob(f"{source.name}-*")):
            with suppress(CorpusError):
                corpora[-1] = already_tokenised(source, tokenizer, folder, config.corpus)
    return corpora


def ids_to_count(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Return (N,) the first tokens of every source to be learned, of each an equal part of what there is room for."""
    corpora = open_sources(config, config.corpus.new, tokenizer)
    return np.concatenate([corpus.ids[: _NUM_COUNTED // len(corpora)] for corpus in corpora], dtype=np.int64)


def windows_of(config: CorpusConfig, corpus: TokenisedCorpus) -> PackedWindows:
    """Return what a corpus is trained on in."""
    length = config.sequence_length
    if not config.isolate_documents:
        return PackedWindows(corpus.ids, length, corpus.learned)
    by_last = corpus.markers.bos is None
    return IsolatedWindows(corpus.ids, length, corpus.offsets, corpus.learned, marked_by_last=by_last)


def build_batches(
    config: RunConfig,
    corpora: Sequence[TokenisedCorpus],
    num_processes: int,
    scores: Sequence[Scores | None] = (),
) -> Batches:
    """Return the batches of a whole run, each shared by some processes; `scores` choose or order a source's windows."""
    windows: list[Windows] = []
    for source, corpus, of_source in zip_longest(config.corpus.sources, corpora, scores):
        whole = windows_of(config.corpus, corpus)
        windows.append(whole if of_source is None else chosen_windows(source, whole, of_source))
    return Batches(
        windows,
        config.corpus.mixture(config.train.max_steps)[0][1],
        seed=config.seed,
        num_steps=config.train.max_steps,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.sequences_at_once(num_processes),
        distillation=[
            config.method.distillation.weight if source.role == "replay" else 0.0 for source in config.corpus.sources
        ],
        stages=config.corpus.mixture(config.train.max_steps),
    )


def content_names(corpora: Sequence[TokenisedCorpus], batches: Batches) -> list[str]:
    """Return what names all that a run trains on: every corpus, and which of its windows, where some are chosen."""
    return [
        corpus.folder.name + (f"/{windows.sha256[:12]}" if isinstance(windows, ChosenWindows) else "")
        for corpus, windows in zip(corpora, batches.sources, strict=True)
    ]


def check_same_text(folder: Path, corpora: Sequence[TokenisedCorpus]) -> None:
    """Refuse to go on with other text than a checkpoint or `final/` was trained on."""
    names = [before.partition("/")[0] for before in read_corpora(folder)]
    changed = [
        f"{before} -> {corpus.folder.name}"
        for before, corpus in zip(names, corpora, strict=True)
        if before != corpus.folder.name
    ]
    if changed:
        raise RunFolderError(
            f"{folder}: other text was trained on: {', '.join(changed)} (a source and its hash); give back the text "
            "that was, or start anew in another output_dir"
        )


def check_same_choice(folder: Path, names: Sequence[str], config: RunConfig) -> None:
    """Refuse to go on with other windows of the same text, or in another order: they were judged anew, elsewhere."""
    for source, before, now in zip(config.corpus.sources, read_corpora(folder), names, strict=True):
        if before.partition("/")[2] != now.partition("/")[2]:
            raise RunFolderError(
                f"{folder}: other windows of {source.name} were chosen, or in another order, by scores that are no "
                "longer in the cache and come out otherwise here; give those back, or start anew in another output_dir"
            )


def check_same_stages(where: Path, step: int, before: RunConfig, now: RunConfig) -> None:
    """Refuse to go on where what was trained so far would have been drawn otherwise, had the run been as long as now.

    Where `corpus.stages` end is a share of `train.max_steps`.
    """
    ends = [[end for end, _ in config.corpus.mixture(config.train.max_steps)] for config in (before, now)]
    if moved := [pair for pair in zip(*ends, strict=True) if min(*pair) < step and len(set(pair)) > 1]:
        was, would = moved[0]
        raise RunFolderError(
            f"{where}: corpus.stages: the one that ended at step {was:,} would end at {would:,}, and {step:,} are "
            f"trained; go on from a checkpoint of step {min(was, would):,} or before, or start anew in another "
            "output_dir"
        )
