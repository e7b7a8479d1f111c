"""The verb `scale prepare`: tokenise every corpus of a config ahead of training."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import cache_of, corpus_warnings, every_source, open_sources
from scale_cli.data.ledger import Ledger
from scale_cli.processes import Share
from scale_cli.runs.opened import Run
from scale_cli.terminal import log
from scale_cli.values import counted


def prepare(config: RunConfig) -> dict[str, Any]:
    """Tokenise all training and held-out corpora that are not cached, or join the cached parts."""
    tokenizer = _tokenizer_of(config)
    training = open_sources(config, config.corpus.sources, tokenizer)
    held_out = open_sources(config, config.evaluation.perplexity, tokenizer)
    corpora = dict(zip(_names(config), [*training, *held_out], strict=True))
    for name, corpus in corpora.items():
        ledger = corpus.ledger
        kept = ledger.kept
        amount = f"{counted(kept.documents, 'document')}, {kept.num_bytes:,} bytes"
        log(f"corpus         {name}: {amount}, {ledger.num_tokens:,} tokens")
        if losses := ledger.described_losses():
            log(f"dropped        {losses}")
        log(f"written        {corpus.folder}")
    warnings = corpus_warnings(config, training, held_out)
    for warning in warnings:
        log(f"warning: {warning}")
    read = {
        name: {"folder": corpus.folder, "ledger": corpus.ledger} for name, corpus in corpora.items()
    }
    return {"corpora": read, "warnings": warnings}


def prepare_part(config: RunConfig, share: Share) -> dict[str, Ledger]:
    """Tokenise a share of the files of every corpus; `prepare` joins it with the others."""
    cache = cache_of(config, _tokenizer_of(config))
    parts = [cache.tokenise_parts(source, share) for source in every_source(config)]
    ledgers = dict(zip(_names(config), parts, strict=True))
    for name, part in ledgers.items():
        log(
            f"part           {name}: {counted(part.files, 'file')}, {part.kept.num_bytes:,} bytes, "
            f"{part.num_tokens:,} tokens"
        )
    return ledgers


def _tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase:
    run = Run(config)
    run.check(every_source(config))
    return run.tokenizer


def _names(config: RunConfig) -> list[str]:
    """Return a distinct name for each source; a held-out one may be named like a training one."""
    names = [f"{source.name} (trained on)" for source in config.corpus.sources]
    return [*names, *(f"{source.name} (evaluated on)" for source in config.evaluation.perplexity)]
