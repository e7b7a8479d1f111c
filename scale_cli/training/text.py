"""The text of a run, opened: what it trains on, in which batches, and what it measures itself on on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from scale_cli.data.batches import Batches
from scale_cli.data.corpora import (
    build_batches,
    content_names,
    held_out_in_cache,
    open_sources,
)
from scale_cli.data.doubtful import corpus_warnings
from scale_cli.data.selection import ChosenWindows
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import main_first
from scale_cli.upscale.run import MethodFolder, Run
from scale_cli.upscale.window_scores import scores_of


@dataclass(frozen=True)
class RunText:
    """The text of a run."""

    corpora: list[TokenisedCorpus]  # one for every source
    held_out: list[TokenisedCorpus]  # measured on the way; none where nothing is
    batches: Batches  # of the whole run
    contents: list[str]  # what was read of every source, by hash


def open_text(start: MethodFolder, accelerator: Accelerator, log: Callable[[str], None]) -> RunText:
    """Tokenise what is not in the cache, choose of it what is trained on, and say what there is."""
    config, tokenizer = start.run.config, start.tokenizer
    corpora = main_first(lambda: open_sources(config, config.corpus.sources, tokenizer))
    held_out = []
    if config.train.eval_every_steps:
        held_out = main_first(lambda: open_sources(config, config.evaluation.perplexity, tokenizer))
    scores = main_first(lambda: scores_of(config, corpora, start.record, len(tokenizer)))
    batches = build_batches(config, corpora, accelerator.num_processes, scores)
    if accelerator.is_main_process:
        _log_corpora(start.run, corpora, held_out or held_out_in_cache(config, tokenizer), log)
        for source, windows in zip(config.corpus.sources, batches.sources, strict=True):
            if isinstance(windows, ChosenWindows):
                log(f"chosen         {source.name}: {windows.described} by {source.judge}")
    return RunText(corpora, held_out, batches, content_names(corpora, batches))


def _log_corpora(
    run: Run,
    corpora: list[TokenisedCorpus],
    held_out: Sequence[TokenisedCorpus | None],
    log: Callable[[str], None],
) -> None:
    """Say what is trained on, what was dropped of it, and what is doubtful about it."""
    config = run.config
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        losses = corpus.ledger.described_losses()
        dropped = f"; dropped {losses}" if losses else ""
        read = f"{len(corpus):,} documents, {corpus.ledger.num_tokens:,} tokens{dropped}"
        log(f"corpus         {source.name}{' (replay)' if source.role == 'replay' else ''}: {read}")
    for warning in corpus_warnings(config, corpora, held_out):
        log(f"warning: {warning}")
