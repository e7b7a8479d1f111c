"""The verb `scale prepare`: tokenise every corpus of a config ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import corpus_warnings, every_source, open_sources
from scale_cli.data.tokens import TokenisedCorpus
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


def prepare(config: RunConfig) -> PrepareSummary:
    """Tokenise all training and held-out corpora that the cache does not hold."""
    run = Run(config)
    run.check(every_source(config))
    tokenizer = run.tokenizer
    training = open_sources(config, config.corpus.sources, tokenizer)
    held_out = open_sources(config, config.evaluation.perplexity, tokenizer)
    # A held-out source may be named like one that is trained on.
    names = [f"{source.name} (trained on)" for source in config.corpus.sources]
    names += [f"{source.name} (held out)" for source in config.evaluation.perplexity]
    warnings = corpus_warnings(config, training, held_out)
    return PrepareSummary(dict(zip(names, [*training, *held_out], strict=True)), warnings)
