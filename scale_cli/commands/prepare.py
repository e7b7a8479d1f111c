"""The verb `scale prepare`: tokenise every corpus of a config ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import cache_of, corpus_warnings, every_source, open_sources
from scale_cli.data.ledger import Ledger
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.processes import Share
from scale_cli.upscale.run import Run


@dataclass(frozen=True)
class PrepareSummary:
    """What is tokenised now, for the terminal."""

    corpora: dict[str, TokenisedCorpus]
    warnings: list[str]

    def lines(self) -> list[str]:
        """Return what every source holds, what was dropped of it, and where it lies."""
        lines = []
        for name, corpus in self.corpora.items():
            kept, num_tokens = corpus.ledger.kept, corpus.ledger.num_tokens
            lines.append(
                f"corpus         {name}: {kept.documents:,} documents, {kept.num_bytes:,} bytes, {num_tokens:,} tokens"
            )
            if losses := corpus.ledger.described_losses():
                lines.append(f"dropped        {losses}")
            lines.append(f"written        {corpus.folder}")
        return [*lines, *(f"warning: {line}" for line in self.warnings)]


@dataclass(frozen=True)
class PartSummary:
    """What one of several tasks has tokenised, for the terminal."""

    sources: dict[str, Ledger]

    def lines(self) -> list[str]:
        return [
            f"part           {name}: {part.files:,} files, {part.kept.num_bytes:,} bytes, {part.num_tokens:,} tokens"
            for name, part in self.sources.items()
        ]


def prepare(config: RunConfig) -> PrepareSummary:
    """Tokenise all training and held-out corpora that the cache does not hold, or join the parts that it holds."""
    tokenizer = _checked(config).tokenizer
    training = open_sources(config, config.corpus.sources, tokenizer)
    held_out = open_sources(config, config.evaluation.perplexity, tokenizer)
    warnings = corpus_warnings(config, training, held_out)
    return PrepareSummary(dict(zip(_described(config), [*training, *held_out], strict=True)), warnings)


def prepare_part(config: RunConfig, share: Share) -> PartSummary:
    """Tokenise a share of the files of every corpus; `prepare` joins it with the others."""
    cache = cache_of(config, _checked(config).tokenizer)
    parts = [cache.tokenise_parts(source, share) for source in every_source(config)]
    return PartSummary(dict(zip(_described(config), parts, strict=True)))


def _checked(config: RunConfig) -> Run:
    run = Run(config)
    run.check(every_source(config))
    return run


def _described(config: RunConfig) -> list[str]:
    """Return a name for every source; a held-out one may be named like one that is trained on."""
    names = [f"{source.name} (trained on)" for source in config.corpus.sources]
    return [*names, *(f"{source.name} (held out)" for source in config.evaluation.perplexity)]
