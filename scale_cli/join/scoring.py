"""What every head of a joined model, and the router over them, pays for every document of the held-out corpora."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.corpora import open_sources
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.evaluation.scoring import Passes, score_corpus
from scale_cli.evaluation.statistics import Values, finite
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.upscale.method import router_of


@dataclass(frozen=True)
class HeldOut:
    """One corpus, opened, and the run that evaluates on it."""

    source: EvaluationSource
    corpus: TokenisedCorpus
    config: RunConfig


@dataclass(frozen=True)
class HeadFigures:
    """One head, or the router, on one corpus; a figure that is not finite is None."""

    nats_per_token: float | None  # cross-entropy
    bits_per_byte: float | None  # the same loss per UTF-8 byte of text
    share: float | None  # of the tokens, how much this head served; None of the router


@dataclass(frozen=True)
class JoinedCorpus:
    """A corpus under every head and the router."""

    name: str  # of the corpus; of two with the same name and other texts the second has its run's name behind it
    language: str  # of its text
    num_documents: int  # scored
    num_tokens: int  # scored
    heads: dict[str, HeadFigures]  # by name, the base's first
    routed: HeadFigures  # the mixture
    worst_document_nats: float | None  # the most that routing cost over the best head on any one document


def open_corpora(configs: list[RunConfig], tokenizer: PreTrainedTokenizerBase) -> dict[str, HeldOut]:
    """Open the held-out corpora of some runs, by name; one that several have, by name and content, is there once."""
    opened: dict[str, HeldOut] = {}
    for config in configs:
        corpora = open_sources(config, config.evaluation.perplexity, tokenizer)
        for source, corpus in zip(config.evaluation.perplexity, corpora, strict=True):
            if any(corpus.folder.name == other.corpus.folder.name for other in opened.values()):
                continue
            name = source.name if source.name not in opened else f"{source.name} ({config.output_dir.name})"
            opened[name] = HeldOut(source, corpus, config)
    return opened


def score(model: JoinedForCausalLM, name: str, held_out: HeldOut) -> JoinedCorpus:
    """Score every document of a corpus, in the windows, batches and precision of its run."""
    losses = score_corpus(
        model,
        held_out.corpus,
        router_of(model),
        Passes.of(held_out.config),
        heads=model.config.head_names,
        progress=f"scoring {name}",
    )
    num_tokens, bits, routed = losses.num_tokens.sum(), losses.num_bytes.sum() * math.log(2), losses.rules["posterior"]

    def figures(nats: Values, share: float | None = None) -> HeadFigures:
        return HeadFigures(finite(nats.sum() / num_tokens), finite(nats.sum() / bits), share)

    shares = losses.served["posterior"].sum(axis=1) / num_tokens
    return JoinedCorpus(
        name=name,
        language=held_out.source.language,
        num_documents=len(routed),
        num_tokens=int(num_tokens),
        heads={
            head: figures(nats, float(share)) for (head, nats), share in zip(losses.heads.items(), shares, strict=True)
        },
        routed=figures(routed),
        worst_document_nats=finite(float(np.max(routed - np.min(list(losses.heads.values()), axis=0)))),
    )
