"""What each head, and each routing rule, pays for every token of a text and every document of a corpus.

One pass of a model gives, for every token, the log-probability under every head and the cosine of the logits of the
first and the last; the routing rules follow from those numbers, so they cost nothing more and can be compared on the
very same pass. A document longer than the context is scored in windows, each starting with the last token of the one
before; the router's weight carries over, so the posterior bound holds for the whole document.

Shapes: K heads, B batch, T tokens, N documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scale_cli.config.schema import RunConfig
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CorpusError
from scale_cli.model.heads import HeadedModel, RouterSettings, TokenLogProbs, token_log_probs
from scale_cli.model.routing import mix_log_probs
from scale_cli.processes import ALONE, Share, shared_out
from scale_cli.progress import progress_bar

TWO_HEADS = ("base", "adapted")
# Documents whose windows are sorted by length together, so that little of a batch is padding.
_DOCUMENTS_AT_ONCE = 256

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenScores:
    """What every head and every routing rule says of tokens, by name, the base head first."""

    heads: dict[str, Tensor]  # (B, T) nats
    rules: dict[str, Tensor]  # (B, T) nats
    log_weights: dict[str, Tensor]  # of every rule (K, B, T): how it weighs the heads


@dataclass(frozen=True)
class DocumentLosses:
    """Of every document."""

    num_tokens: Values  # (N,) scored: the document's and its closing marker
    num_bytes: Values  # (N,) UTF-8 bytes of the text
    heads: dict[str, Values]  # (N,) nats of every head, by name
    rules: dict[str, Values]  # (N,) nats of every rule
    served: dict[str, Values]  # of every rule (K, N): tokens served by each head, its weights summed

    def nats_per_token(self, name: str) -> float:
        """Return what a head, or a rule, pays per token of the corpus."""
        return float(self._nats(name).sum() / self.num_tokens.sum())

    def bits_per_byte(self, name: str) -> float:
        """Return what a head, or a rule, pays per UTF-8 byte of the corpus."""
        return float(self._nats(name).sum() / (self.num_bytes * math.log(2)).sum())

    def base_share(self, rule: str) -> float:
        """Return the share of tokens that the base head served under a rule."""
        return float(self.served[rule][0].sum() / self.num_tokens.sum())

    def _nats(self, name: str) -> Values:
        return self.heads[name] if name in self.heads else self.rules[name]


@dataclass(frozen=True)
class Passes:
    """How texts pass a model."""

    sequence_length: int  # tokens a window
    batch_size: int  # windows at once
    mixed_precision: str  # `no` | `bf16`

    @classmethod
    def of(cls, config: RunConfig) -> Passes:
        """Return what a config's evaluation asks for."""
        asked = config.evaluation
        return cls(asked.sequence_length or config.corpus.sequence_length, asked.batch_size, asked.mixed_precision)


@dataclass(frozen=True)
class _Window:
    """Some consecutive tokens of one document: inputs, and the tokens that follow them."""

    document: int
    start: int
    input_ids: npt.NDArray[np.int64]
    next_ids: npt.NDArray[np.int64]


def score_tokens(tokens: TokenLogProbs, router: RouterSettings, heads: Sequence[str] = TWO_HEADS) -> TokenScores:
    """Return what the heads said of documents, and what the rules make of it: cosine of two heads, posterior of any."""
    log_probs_KBT = tokens.log_probs_KBT.double()
    rules = ("posterior", "cosine") if len(heads) == 2 else ("posterior",)
    log_weights = {rule: tokens.log_weights(rule, router) for rule in rules}
    routed = {rule: mix_log_probs(weights_KBT, log_probs_KBT) for rule, weights_KBT in log_weights.items()}
    return TokenScores(dict(zip(heads, log_probs_KBT, strict=True)), routed, log_weights)


def score_corpus(
    model: HeadedModel,
    corpus: TokenisedCorpus,
    router: RouterSettings,  # of both rules, whatever the model serves
    passes: Passes,
    *,
    heads: Sequence[str] = TWO_HEADS,  # the names of the model's
    max_documents: int | None = None,
    progress: str | None = None,  # what to call it on a progress bar; None for no bar
    share: Share = ALONE,  # of the work, that is this process's; every one of them returns the whole
) -> DocumentLosses:
    """Score the first documents of a corpus, or all of them, by a model in evaluation mode."""
    indices, scores = [], []
    for index, tokens in score_documents(
        model, corpus, passes, max_documents=max_documents, progress=progress, share=share
    ):
        indices.append(index)
        scores.append(score_tokens(tokens, router, heads))
    if not scores:
        raise CorpusError(f"{corpus.folder.name}: no document has a token that could be scored")
    rules = scores[0].rules
    return DocumentLosses(
        num_tokens=np.asarray([of_one.heads[heads[0]].numel() for of_one in scores], dtype=np.float64),
        num_bytes=np.asarray([corpus.num_bytes[index] for index in indices], dtype=np.float64),
        heads={head: np.asarray([-of_one.heads[head].sum().item() for of_one in scores]) for head in heads},
        rules={rule: np.asarray([-of_one.rules[rule].sum().item() for of_one in scores]) for rule in rules},
        served={
            rule: torch.stack([of_one.log_weights[rule].exp().sum(dim=(1, 2)) for of_one in scores], dim=1).numpy()
            for rule in rules
        },
    )


def score_documents(
    model: HeadedModel,
    corpus: TokenisedCorpus,
    passes: Passes,
    *,
    max_documents: int | None = None,
    progress: str | None = None,
    share: Share = ALONE,
) -> Iterator[tuple[int, TokenLogProbs]]:
    """Yield the place of every document in a corpus, and what the heads say of its tokens; as for `score_corpus`."""
    num_documents = min(len(corpus), max_documents or len(corpus))
    with progress_bar(total=num_documents, desc=progress, unit=" docs", disable=progress is None, leave=False) as bar:
        for first in range(0, num_documents, _DOCUMENTS_AT_ONCE):
            documents = range(first, min(first + _DOCUMENTS_AT_ONCE, num_documents))
            yield from _score_together(model, corpus, documents, passes, share)
            bar.update(len(documents))


def _score_together(
    model: HeadedModel, corpus: TokenisedCorpus, documents: range, passes: Passes, share: Share
) -> list[tuple[int, TokenLogProbs]]:
    """Return what the heads said of some documents, each scored window by window."""
    windows = [window for index in documents for window in _windows(corpus, index, passes.sequence_length)]
    sizes = {window.document: window.start + len(window.next_ids) for window in windows}  # the last one's end
    windows.sort(key=lambda window: (-len(window.input_ids), window.document, window.start))
    batches = [windows[first : first + passes.batch_size] for first in range(0, len(windows), passes.batch_size)]
    said_CT: dict[int, Tensor] = {}
    for window, said_TC in shared_out(batches, share, partial(_score_batch, model, passes.mixed_precision)):
        whole_CT = said_CT.setdefault(window.document, torch.empty(said_TC.shape[1], sizes[window.document]))
        whole_CT[:, window.start : window.start + len(said_TC)] = said_TC.T
    return [(index, TokenLogProbs(said_CT[index][:-1, None], said_CT[index][-1:])) for index in sizes]


def _score_batch(model: HeadedModel, mixed_precision: str, batch: Sequence[_Window]) -> list[Tensor]:
    """Return (T, K + 1) for each window: what every head said of its tokens, and the cosine."""
    device = next(model.parameters()).device
    # Padding stands on the right, where causal attention keeps it out of every real position.
    input_ids, next_ids = (
        pad_sequence([torch.from_numpy(getattr(window, name)) for window in batch], batch_first=True).to(device)
        for name in ("input_ids", "next_ids")
    )
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
        tokens = token_log_probs(model, input_ids, next_ids)
    said_CBT = torch.cat([tokens.log_probs_KBT, tokens.cosine_BT.unsqueeze(0)])
    return [said_CBT[:, row, : len(window.next_ids)].T for row, window in enumerate(batch)]


def _windows(corpus: TokenisedCorpus, index: int, sequence_length: int) -> Iterator[_Window]:
    ids = corpus.document(index).astype(np.int64)
    if corpus.markers.bos is None and corpus.markers.context is not None:
        ids = np.concatenate([[corpus.markers.context], ids])
    for start in range(0, len(ids) - 1, sequence_length):
        stop = min(start + sequence_length, len(ids) - 1)
        yield _Window(index, start, ids[start:stop], ids[start + 1 : stop + 1])
