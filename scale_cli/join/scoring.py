"""What every head of a joined model, and the router over them, pays for every document of the held-out corpora."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import EvaluationSource, RunConfig
from scale_cli.data.corpora import open_held_out_corpora
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CorpusError
from scale_cli.evaluation.scoring import ObservedDocument, observe_documents
from scale_cli.evaluation.statistics import finite
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.routing import mix_log_probs, posterior_log_weights

# Documents whose windows are sorted by length together, so that little of a batch is padding.
_DOCUMENTS_AT_ONCE = 256


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
        corpora = open_held_out_corpora(config, tokenizer, show_progress=True)
        for source, corpus in zip(config.evaluation.perplexity, corpora, strict=True):
            if any(corpus.folder.name == other.corpus.folder.name for other in opened.values()):
                continue
            name = source.name if source.name not in opened else f"{source.name} ({config.output_dir.name})"
            opened[name] = HeldOut(source, corpus, config)
    return opened


def score(model: JoinedForCausalLM, name: str, held_out: HeldOut) -> JoinedCorpus:
    """Score every document of a corpus.

    Args:
        model: in evaluation mode.
        name: of the corpus.
        held_out: the corpus; its run's window, batch and precision are used.

    Raises:
        CorpusError: no document has a token that could be scored.
    """
    corpus, head_names = held_out.corpus, model.config.head_names
    prior_K = model.log_prior(torch.device("cpu"))
    losses, shares, num_tokens, num_bytes = [], [], [], []
    for document in _observed(model, held_out, name):
        said_KBT = document.log_probs_KT.double().unsqueeze(1)
        weights_KBT = posterior_log_weights(said_KBT, prior_K[:, None], prior_K, model.config.router_switch_rate)[
            ..., :-1
        ]
        routed = -mix_log_probs(weights_KBT, said_KBT).sum().reshape(1)
        losses.append(torch.cat([-said_KBT.sum(dim=(1, 2)), routed]))
        shares.append(weights_KBT.exp().sum(dim=(1, 2)))
        num_tokens.append(said_KBT.shape[-1])
        num_bytes.append(int(corpus.num_bytes[document.index]))
    if not losses:
        raise CorpusError(f"{name}: no document has a token that could be scored")
    losses_NH, share_K = torch.stack(losses), torch.stack(shares).sum(0) / sum(num_tokens)
    total_H = losses_NH.sum(0)
    figures = [
        HeadFigures(
            finite(float(total) / sum(num_tokens)),
            finite(float(total) / (sum(num_bytes) * math.log(2))),
            None if place == len(head_names) else float(share_K[place]),
        )
        for place, total in enumerate(total_H)
    ]
    return JoinedCorpus(
        name=name,
        language=held_out.source.language,
        num_documents=len(losses),
        num_tokens=sum(num_tokens),
        heads=dict(zip(head_names, figures[:-1], strict=True)),
        routed=figures[-1],
        worst_document_nats=finite(float(_over_the_best(losses_NH).max())),
    )


def _over_the_best(losses_NH: Tensor) -> Tensor:
    """Return (documents,): what routing, the last column, cost over the best head."""
    return losses_NH[:, -1] - losses_NH[:, :-1].amin(dim=1)


def _observed(model: JoinedForCausalLM, held_out: HeldOut, name: str) -> Iterator[ObservedDocument]:
    config, corpus = held_out.config, held_out.corpus
    with tqdm(total=len(corpus), desc=f"scoring {name}", unit=" docs", leave=False) as bar:
        for first in range(0, len(corpus), _DOCUMENTS_AT_ONCE):
            documents = range(first, min(first + _DOCUMENTS_AT_ONCE, len(corpus)))
            yield from observe_documents(
                model,
                corpus,
                documents,
                config.evaluation.sequence_length or config.corpus.sequence_length,
                config.evaluation.batch_size,
                config.evaluation.mixed_precision,
            )
            bar.update(len(documents))
