"""The text of a run, opened: what it trains on, in which batches, and what it measures itself on on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from scale_cli.config.schema import RunConfig
from scale_cli.data.batches import Batches
from scale_cli.data.corpora import (
    build_batches,
    check_same_choice,
    check_same_text,
    content_names,
    held_out_in_cache,
    open_sources,
)
from scale_cli.data.doubtful import corpus_warnings
from scale_cli.data.ledger import Ledger
from scale_cli.data.selection import ChosenWindows
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import main_first
from scale_cli.training.beginning import repetition_warnings
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.session import Session
from scale_cli.upscale.sizes import context_warnings
from scale_cli.upscale.window_scores import scores_of


@dataclass(frozen=True)
class RunText:
    """The text of a run."""

    corpora: list[TokenisedCorpus]  # one for every source
    held_out: list[TokenisedCorpus]  # measured on the way; none where nothing is
    batches: Batches  # of the whole run
    contents: list[str]  # what was read of every source, by hash

    @property
    def ledgers(self) -> list[Ledger]:
        """What was kept of every source, and dropped."""
        return [corpus.ledger for corpus in self.corpora]


def open_text(config: RunConfig, session: Session, accelerator: Accelerator, log: Callable[[str], None]) -> RunText:
    """Tokenise what is not in the cache, choose of it what is trained on, and say what there is."""
    tokenizer, main = session.tokenizer, accelerator.is_main_process
    corpora = main_first(lambda: open_sources(config, config.corpus.sources, tokenizer))
    held_out = []
    if config.train.eval_every_steps:
        held_out = main_first(lambda: open_sources(config, config.evaluation.perplexity, tokenizer))
    scores = main_first(lambda: scores_of(config, corpora, session.record, len(tokenizer)))
    batches = build_batches(config, corpora, accelerator.num_processes, scores)
    if main:
        _log_corpora(config, corpora, held_out or held_out_in_cache(config, tokenizer), log)
        for source, windows in zip(config.corpus.sources, batches.sources, strict=True):
            if isinstance(windows, ChosenWindows):
                log(f"chosen         {source.name}: {windows.described} by {source.judge}")
    return RunText(corpora, held_out, batches, content_names(corpora, batches))


def hold_to_beginning(
    text: RunText, config: RunConfig, start: Path | None, init_from: Path | None, log: Callable[[str], None]
) -> None:
    """Refuse other text than a run was begun on, and warn where one begins with batches that have been.

    Args:
        text: that the run goes on with.
        config: of the run.
        start: the checkpoint that it goes on from; None at its first step.
        init_from: what its first step goes on from; None for its own start.
        log: takes lines.
    """
    if start is not None:
        check_same_text(start, text.corpora, config)
        check_same_choice(start, text.contents, config)
    elif init_from is not None:
        for warning in repetition_warnings(init_from, config, text.contents):
            log(f"warning: {warning}")


def _log_corpora(
    config: RunConfig,
    corpora: list[TokenisedCorpus],
    held_out: Sequence[TokenisedCorpus | None],
    log: Callable[[str], None],
) -> None:
    """Say what is trained on, what was dropped of it, and what is doubtful about it."""
    for source, corpus in zip(config.corpus.sources, corpora, strict=True):
        losses = corpus.ledger.described_losses()
        dropped = f"; dropped {losses}" if losses else ""
        read = f"{len(corpus):,} documents, {corpus.ledger.num_tokens:,} tokens{dropped}"
        log(f"corpus         {source.name}{' (replay)' if source.role == 'replay' else ''}: {read}")
    stretched = context_warnings(config, load_base_config(config.model))
    for warning in [*stretched, *corpus_warnings(config, corpora, held_out)]:
        log(f"warning: {warning}")
