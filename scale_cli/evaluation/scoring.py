"""The loss of each head and each routing rule, on every token and document of a corpus.

One pass of a model gives each token's log-probability under every head, and the cosine of the
logits of the first and the last head. The routing rules follow from these numbers: they cost
nothing more, and are compared on the same pass. A document is scored whole, from its first token.
One that is longer than the base's context is read in windows that overlap by half. The router's
weight carries over, so the posterior bound holds for the whole document.

Shapes: K heads, C = K + 1 numbers of a token (its log-probabilities and the cosine), B batch, T
tokens, N documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scale_cli.config.schema import RunConfig
from scale_cli.data.encoding import Ids, Integers
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CorpusError
from scale_cli.evaluation.base_scores import BaseScores
from scale_cli.evaluation.intervals import Values
from scale_cli.evaluation.windows import context_windows, num_read
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import (
    ModelPair,
    Streams,
    TokenLogProbs,
    base_alone,
    token_log_probs,
)
from scale_cli.model.pass_scale import ScaleCache
from scale_cli.model.routing import mix_log_probs
from scale_cli.processes import ALONE, Share, autocast, gathered, map_over_processes
from scale_cli.terminal import progress_bar
from scale_cli.upscale.base_files import BaseRecord

# Tokens of documents held in memory together; windows are sorted by length, to limit padding.
_TOKENS_AT_ONCE = 2**20
# Tokens that the routing rules, which are computed in float64 on the CPU, see at once.
_TOKENS_ROUTED_AT_ONCE = 2**16
RULES = ("posterior", "cosine")


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of every document."""

    places: Integers  # (N,) of the documents in the corpus
    num_tokens: Values  # (N,) scored: the document's and its closing marker
    num_bytes: Values  # (N,) UTF-8 bytes of the text
    nats: dict[str, Values]  # (N,) of every head and rule, by name
    served: dict[str, Values]  # by rule (K, N): tokens served by each head, the sum of its weights

    def nats_per_token(self, name: str) -> float:
        return float(self.nats[name].sum() / self.num_tokens.sum())

    def bits_per_byte(self, name: str) -> float:
        return float(self.nats[name].sum() / (self.num_bytes * math.log(2)).sum())

    def base_share(self, rule: str) -> float:
        return float(self.served[rule][0].sum() / self.num_tokens.sum())

    def among(self, places: Integers) -> DocumentLosses:
        """Return the losses of those documents alone that have these places."""
        kept = np.isin(self.places, places)
        return DocumentLosses(
            places=self.places[kept],
            num_tokens=self.num_tokens[kept],
            num_bytes=self.num_bytes[kept],
            nats={name: nats_N[kept] for name, nats_N in self.nats.items()},
            served={rule: served_KN[:, kept] for rule, served_KN in self.served.items()},
        )


@dataclass(frozen=True)
class Passes:
    """Sizes and precision of the passes that score texts."""

    context: int  # the most tokens that one is predicted from
    sequence_length: int
    batch_size: int  # rows of sequence_length tokens in one pass; of shorter rows, more
    mixed_precision: str  # `no` | `bf16` | `fp16`

    @classmethod
    def of(cls, config: RunConfig, num_positions: int) -> Passes:
        """Return what a config asks for, with a base of so many positions."""
        asked = config.evaluation
        return cls(
            context=asked.sequence_length or num_positions,
            sequence_length=config.corpus.sequence_length,
            batch_size=asked.batch_size,
            mixed_precision=asked.mixed_precision,
        )

    @property
    def tokens_at_once(self) -> int:
        """The most tokens of a pass: of whole rows, or a part of a longer one."""
        return self.batch_size * self.sequence_length


@dataclass(frozen=True)
class ScoredRows:
    """Some rows of tokens under every head and rule, padded on the right."""

    places: list[int]  # of the rows
    is_token_BT: Tensor  # False for padding
    log_probs: dict[str, Tensor]  # (B, T) nats of each token, by head and rule
    log_weights: dict[str, Tensor]  # (K, B, T) that a rule gives the heads, by rule


def scored_lengths(corpus: TokenisedCorpus) -> Integers:
    """Return (N,) tokens of each document that can be scored: those with one before them."""
    lengths_N = np.diff(corpus.offsets).astype(np.int64)
    boundary = corpus.markers.context
    first_N = corpus.ids[corpus.offsets[:-1]]
    return lengths_N - (1 if boundary is None else (first_N == boundary).astype(np.int64))


def num_tokens_read(corpus: TokenisedCorpus, context: int) -> int:
    """Return how many inputs `score_corpus` gives a model."""
    return sum(num_read(int(length), context) for length in scored_lengths(corpus))


def beginnings(corpus: TokenisedCorpus, length: int, max_tokens: int) -> Integers:
    """Return (N,) tokens of each document that a bounded evaluation scores.

    It reads the first documents, of each at most its first `length` tokens. So a long document does
    not take the place of many.
    """
    cut_N = scored_lengths(corpus).clip(max=length)
    return (max_tokens - (cut_N.cumsum() - cut_N)).clip(0, cut_N)


def same_beginnings(
    lengths_N: Integers, corpus: TokenisedCorpus, other: TokenisedCorpus
) -> Integers:
    """Return (N,) tokens of `other` that are the text of the first `lengths_N` tokens of `corpus`.

    Both hold the same documents, by two tokenizers. A document that is cut is cut in proportion, so
    exactly where both have the same tokens.
    """
    shares_N = lengths_N / scored_lengths(corpus).clip(min=1)
    return np.rint(shares_N * scored_lengths(other)).astype(np.int64)


def kept_scores(
    model: Streams, corpus: TokenisedCorpus, base: BaseRecord, config: RunConfig, passes: Passes
) -> BaseScores | None:
    """Return what is kept of a base on a corpus; None if a pass of the model has to show both heads:
    one model that holds its base, or the rule that compares their logits.
    """
    if not model.base_is_apart or config.method.rules.rule == "cosine":
        return None
    return BaseScores.of(corpus, scored_lengths(corpus), base, config, passes.context)


def tokens_bar(total: int, label: str | None) -> Any:
    """Return a progress bar over tokens that a model reads; None for no label and no bar."""
    return progress_bar(
        total=total,
        desc=label,
        unit=" tokens",
        unit_scale=True,
        disable=label is None,
        leave=False,
    )


def score_beginnings(
    model: Streams,
    corpora: Sequence[TokenisedCorpus],
    lengths: Sequence[Integers],  # of each corpus: tokens of each document
    *,
    config: RunConfig,
    passes: Passes,
    base: BaseRecord | None,  # whose scores are kept, where the model has it apart; None: none are
    label: str | None,  # of a bar
    share: Share = ALONE,  # this process's share of the work
) -> list[DocumentLosses]:
    """Score the beginnings of the documents of several corpora."""
    scored = []
    with tokens_bar(sum(int(lengths_N.sum()) for lengths_N in lengths), label) as bar:
        for corpus, lengths_N in zip(corpora, lengths, strict=True):
            kept = None if base is None else kept_scores(model, corpus, base, config, passes)
            losses = score_corpus(
                model,
                corpus,
                config.method.rules,
                passes,
                lengths_N=lengths_N,
                kept=kept,
                bar=bar,
                share=share,
            )
            scored.append(losses)
    return scored


def score_corpus(
    model: Streams,
    corpus: TokenisedCorpus,
    router: RouterConfig,  # of both rules, whatever the model serves
    passes: Passes,
    *,
    lengths_N: Integers | None = None,  # tokens of each document; None for all
    kept: BaseScores | None = None,  # of this corpus, if the base is a model of its own
    bar: Any = None,  # `tokens_bar`, which moves with every batch of windows
    share: Share = ALONE,  # this process's share of the work; each process returns the whole
) -> DocumentLosses:
    """Score a corpus, or the beginnings of its documents, by a model in evaluation mode.

    With `kept`, the base is asked only for what it was never asked for, and there is no cosine.
    """
    whole_N = scored_lengths(corpus)
    if lengths_N is None:
        lengths_N = whole_N
    scored = np.flatnonzero(lengths_N)
    if len(scored) == 0:
        raise CorpusError(f"{corpus.folder.name}: no document has a token that could be scored")

    rules = RULES if kept is None else ("posterior",)
    nats: dict[str, Values] = {}
    served: dict[str, Values] = {}
    group_of = lengths_N[scored].cumsum() // _TOKENS_AT_ONCE
    for group in np.split(scored, np.flatnonzero(np.diff(group_of)) + 1):
        documents = [corpus.with_boundary(index)[: lengths_N[index] + 1] for index in group]
        see = partial(
            observe_documents,
            boundary=corpus.markers.context,
            passes=passes,
            share=share,
            bar=bar,
        )
        if kept is None:
            observed = see(model, documents)
        else:
            observed = _beside_kept_base(
                model, kept, group.tolist(), documents, see, share=share, bar=bar
            )

        for rows in routed_rows(observed, router, model.heads, rules):
            places = group[rows.places]
            for name, log_probs_BT in rows.log_probs.items():
                nats_N = nats.setdefault(name, np.zeros(len(corpus)))
                nats_N[places] = -log_probs_BT.where(rows.is_token_BT, 0.0).sum(dim=1)
            for rule, log_weights_KBT in rows.log_weights.items():
                served_KN = served.setdefault(rule, np.zeros((len(model.heads), len(corpus))))
                weights_KBT = log_weights_KBT.exp().where(rows.is_token_BT, 0.0)
                served_KN[:, places] = weights_KBT.sum(dim=2)

    if kept is not None:
        kept.save()

    # A document that is cut stands for its bytes in proportion to its tokens.
    num_bytes_N = np.asarray(corpus.num_bytes) * lengths_N / whole_N.clip(min=1)
    places = np.arange(len(corpus))
    losses = DocumentLosses(places, lengths_N.astype(np.float64), num_bytes_N, nats, served)
    return losses.among(scored)


def observe_documents(
    model: Streams,
    documents: Sequence[Ids],
    *,
    boundary: int | None,
    passes: Passes,
    share: Share,
    bar: Any,
) -> list[Tensor]:
    """Return (C, T) on the CPU for each document, of its tokens from the second on."""
    windows = [context_windows(ids, passes.context, boundary) for ids in documents]
    flat = [window for of_document in windows for window in of_document]
    seen = observe(model, [torch.from_numpy(window.ids) for window in flat], passes, share, bar)
    scored = (seen_CT[:, -window.num_scored :] for window, seen_CT in zip(flat, seen, strict=True))
    return [torch.cat(list(islice(scored, len(of_document))), dim=1) for of_document in windows]


def _beside_kept_base(
    model: Any,  # ModelPair, of one head or two
    kept: BaseScores,
    places: Sequence[int],
    documents: Sequence[Ids],
    see: Callable[[Streams, Sequence[Ids]], list[Tensor]],
    *,
    share: Share,
    bar: Any,
) -> list[Tensor]:
    """Return what `see` would, of a model whose heads are models of their own; cosines are NaN."""
    lengths = [len(ids) - 1 for ids in documents]
    # Of the base; what `keep` fills in below is in them too.
    known = [kept.of_document(*document) for document in zip(places, lengths, strict=True)]
    mine = [index for index, known_T in enumerate(known) if known_T.isnan().any()]
    # Machines without a common disk keep different scores, and all processes run the same passes.
    lacking = sorted({index for of_one in gathered(mine, share) for index in of_one})
    has_trained = "trained" in model.heads
    if bar is not None and has_trained:
        bar.total += sum(lengths[index] for index in lacking)  # they are read twice
    if lacking:
        seen = see(base_alone(model), [documents[index] for index in lacking])
        for index, seen_CT in zip(lacking, seen, strict=True):
            kept.keep(places[index], seen_CT[0])

    heads = [known]
    if has_trained:
        trained = ModelPair(trained=model.trained)
        heads.append([seen_CT[0] for seen_CT in see(trained, documents)])
    heads.append([torch.full_like(known_T, torch.nan) for known_T in known])
    return [torch.stack(rows) for rows in zip(*heads, strict=True)]


def batches_of(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return places of rows in batches, longest first, of at most `max_tokens` with padding."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def observe(
    model: Any,  # Streams
    rows: Sequence[Tensor],  # of token ids
    passes: Passes,
    share: Share = ALONE,
    bar: Any = None,  # `tokens_bar`
) -> list[Tensor]:
    """Return (C, T) on the CPU for each row, of its tokens from the second on.

    A row of more than `passes.tokens_at_once` is read in parts, with the model's cache. A sharded
    model takes no such row: its processes must run as many passes each.
    """
    device = next(model.parameters()).device

    def observe_batch(batch: Sequence[int]) -> list[Tensor]:
        # Padding is on the right, where causal attention keeps it out of every real position.
        ids = pad_sequence([rows[place] for place in batch], batch_first=True).to(device)
        parts = ids[:, :-1].split(passes.tokens_at_once, dim=1)
        next_ids = ids[:, 1:].split(passes.tokens_at_once, dim=1)
        cache = ScaleCache() if len(parts) > 1 else None
        with torch.no_grad(), autocast(device.type, passes.mixed_precision):
            tokens = [
                token_log_probs(model, inputs, observed, cache)
                for inputs, observed in zip(parts, next_ids, strict=True)
            ]
        seen_CBT = torch.cat(
            [torch.cat([of.log_probs_KBT, of.cosine_BT[None]]) for of in tokens], dim=2
        )
        if bar is not None:
            bar.update(share.num_processes * sum(lengths[place] for place in batch))
        return [
            seen_CT[:, : lengths[place]]
            for place, seen_CT in zip(batch, seen_CBT.unbind(dim=1), strict=True)
        ]

    lengths = [len(row) - 1 for row in rows]
    batches = batches_of(lengths, passes.tokens_at_once)
    observed = map_over_processes(batches, share, observe_batch)
    return [observed[place] for place in range(len(rows))]


def routed_rows(
    observed: Sequence[Tensor],
    router: RouterConfig,
    heads: Sequence[str],
    rules: Sequence[str] = RULES,
) -> Iterator[ScoredRows]:
    """Apply the routing rules to (C, T) numbers of rows, many rows at once; a single head is not
    routed.
    """
    rules = rules if len(heads) > 1 else ()
    lengths = [row_CT.shape[1] for row_CT in observed]
    for places in batches_of(lengths, _TOKENS_ROUTED_AT_ONCE):
        padded_BTC = pad_sequence([observed[place].T for place in places], batch_first=True)
        padded_CBT = padded_BTC.permute(2, 0, 1)
        tokens = TokenLogProbs(padded_CBT[:-1], padded_CBT[-1])
        log_probs_KBT = tokens.log_probs_KBT.double()
        log_weights = {rule: tokens.log_weights(rule, router) for rule in rules}
        routed = {
            rule: mix_log_probs(weights_KBT, log_probs_KBT)
            for rule, weights_KBT in log_weights.items()
        }
        lengths_B = torch.tensor([lengths[place] for place in places])
        is_token_BT = torch.arange(padded_CBT.shape[2]) < lengths_B[:, None]
        by_name = dict(zip(heads, log_probs_KBT, strict=True)) | routed
        yield ScoredRows(places, is_token_BT, by_name, log_weights)
