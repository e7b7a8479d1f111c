"""The corpora a config names, opened: training batches and held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.data.batches import Batches, IsolatedWindows, PackedWindows
from scale_cli.data.tokens import TokenisedCorpus, already_tokenised, tokenised
from scale_cli.errors import CorpusError, RunFolderError
from scale_cli.storage.layout import RunFolder


def cache_dir(config: RunConfig) -> Path:
    """Return where tokenised corpora lie."""
    return config.corpus.cache_dir or RunFolder(config.output_dir).tokens


def training_sources(config: RunConfig) -> list[TextSource]:
    """Return every source that training reads: what is trained on, and what is scored on the way."""
    return [*config.corpus.sources, *(config.evaluation.perplexity if config.train.eval_every_steps else ())]


def every_source(config: RunConfig) -> list[TextSource]:
    """Return every source of a config, trained on or held out."""
    return [*config.corpus.sources, *config.evaluation.perplexity]


def open_training_corpora(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool
) -> list[TokenisedCorpus]:
    """Open every training source, tokenising what the cache does not hold."""
    return _opened(config, config.corpus.sources, tokenizer, show_progress)


def open_held_out_corpora(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool
) -> list[TokenisedCorpus]:
    """Open every evaluation source, tokenising what the cache does not hold."""
    return _opened(config, config.evaluation.perplexity, tokenizer, show_progress)


def held_out_in_cache(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[TokenisedCorpus | None]:
    """Open every evaluation source that the cache holds; None for the others, and for those that are not there."""
    folder = cache_dir(config)
    return [_in_cache(source, tokenizer, folder, config) for source in config.evaluation.perplexity]


def _in_cache(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path, config: RunConfig
) -> TokenisedCorpus | None:
    if not any(folder.glob(f"{source.name}-*")):
        return None
    with suppress(CorpusError):
        return already_tokenised(source, tokenizer, folder, config.corpus)
    return None


def _opened(
    config: RunConfig, sources: Sequence[TextSource], tokenizer: PreTrainedTokenizerBase, show_progress: bool
) -> list[TokenisedCorpus]:
    folder = cache_dir(config)
    return [
        tokenised(source, tokenizer, folder, show_progress=show_progress, reading=config.corpus) for source in sources
    ]


def open_replay_corpora(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool
) -> list[TokenisedCorpus]:
    """Open every training source of what the base knows, tokenising what the cache does not hold."""
    sources = [source for source in config.corpus.sources if source.role == "replay"]
    return _opened(config, sources, tokenizer, show_progress)


def windows_of(config: RunConfig, corpus: TokenisedCorpus) -> PackedWindows:
    """Return what a corpus is trained on in."""
    length = config.corpus.sequence_length
    if not config.corpus.isolate_documents:
        return PackedWindows(corpus.ids, length, corpus.learned)
    by_last = corpus.boundaries.bos is None
    return IsolatedWindows(corpus.ids, length, corpus.offsets, corpus.learned, marked_by_last=by_last)


def build_batches(config: RunConfig, corpora: list[TokenisedCorpus], num_processes: int) -> Batches:
    """Return the batches of a whole run, each shared by some processes."""
    return Batches(
        [windows_of(config, corpus) for corpus in corpora],
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
