"""The loss of each head and each routing rule, on every token of a text and every document of a corpus.

One pass of a model gives each token's log-probability under every head, and the cosine of the logits of the first and
the last head. The routing rules follow from these numbers: they cost nothing more, and are compared on the same pass.
A document longer than the context is scored in windows, each starting with the last token of the window before. The
router's weight carries over, so the posterior bound holds for the whole document.

Shapes: K heads, B batch, T tokens, N documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from scale_cli.processes import ALONE, Share, autocast, shared_out
from scale_cli.terminal import progress_bar

TWO_HEADS = ("base", "adapted")
# Documents whose windows are sorted by length together, to limit padding.
_DOCUMENTS_AT_ONCE = 256

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of every document."""

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


@dataclass(frozen=True)
class Passes:
    """Sizes and precision of the passes that score texts."""

    sequence_length: int  # tokens per window
    batch_size: int  # windows at once
    mixed_precision: str  # `no` | `bf16` | `fp16`

    @classmethod
    def of(cls, config: RunConfig) -> Passes:
        asked = config.evaluation
        return cls(
            asked.sequence_length or config.corpus.sequence_length,
            asked.batch_size,
            asked.mixed_precision,
        )


@dataclass(frozen=True)
class _Window:
    """Consecutive tokens of one document; each but the first is predicted from those before it."""

    document: int
    start: int
    ids: Tensor


def score_tokens(
    tokens: TokenLogProbs, router: RouterSettings, heads: Sequence[str] = TWO_HEADS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tokens' log-probabilities by head and rule, (B, T) nats, and each rule's log-weights of heads, (K, B, T).

    The cosine rule needs two heads.
    """
    log_probs_KBT = tokens.log_probs_KBT.double()
    rules = ("posterior", "cosine") if len(heads) == 2 else ("posterior",)
    log_weights = {rule: tokens.log_weights(rule, router) for rule in rules}
    routed = {
        rule: mix_log_probs(weights_KBT, log_probs_KBT) for rule, weights_KBT in log_weights.items()
    }
    return dict(zip(heads, log_probs_KBT, strict=True)) | routed, log_weights


def score_corpus(
    model: HeadedModel,
    corpus: TokenisedCorpus,
    router: RouterSettings,  # of both rules, whatever the model serves
    passes: Passes,
    *,
    heads: Sequence[str] = TWO_HEADS,  # names of the model's heads
    max_documents: int | None = None,
    progress: str | None = None,  # label of the progress bar; None for no bar
    share: Share = ALONE,  # this process's share of the work; each process returns the whole
) -> DocumentLosses:
    """Score the first documents of a corpus, or all of them, by a model in evaluation mode."""
    num_documents, scores = min(len(corpus), max_documents or len(corpus)), []
    with progress_bar(
        total=num_documents, desc=progress, unit=" docs", disable=progress is None, leave=False
    ) as bar:
        for first in range(0, num_documents, _DOCUMENTS_AT_ONCE):
            documents = range(first, min(first + _DOCUMENTS_AT_ONCE, num_documents))
            observed = _observe_documents(model, corpus, documents, passes, share)
            scores += [(index, *score_tokens(tokens, router, heads)) for index, tokens in observed]
            bar.update(len(documents))
    if not scores:
        raise CorpusError(f"{corpus.folder.name}: no document has a token that could be scored")
    places, log_probs, log_weights = zip(*scores, strict=True)
    return DocumentLosses(
        num_tokens=np.asarray([said[heads[0]].numel() for said in log_probs], dtype=np.float64),
        num_bytes=np.asarray([corpus.num_bytes[index] for index in places], dtype=np.float64),
        nats={
            name: np.asarray([-said[name].sum().item() for said in log_probs])
            for name in log_probs[0]
        },
        served={
            rule: torch.stack(
                [weights[rule].exp().sum(dim=(1, 2)) for weights in log_weights], dim=1
            ).numpy()
            for rule in log_weights[0]
        },
    )


def _observe_documents(
    model: HeadedModel, corpus: TokenisedCorpus, documents: range, passes: Passes, share: Share
) -> list[tuple[int, TokenLogProbs]]:
    """Return the documents' indices, and the heads' log-probabilities of their tokens, scored in windows."""
    windows = [
        window for index in documents for window in _windows(corpus, index, passes.sequence_length)
    ]
    sizes = {
        window.document: window.start + len(window.ids) - 1 for window in windows
    }  # the end of the last window
    windows.sort(key=lambda window: (-len(window.ids), window.document, window.start))
    batches = [
        windows[first : first + passes.batch_size]
        for first in range(0, len(windows), passes.batch_size)
    ]

    def observe_windows(batch: Sequence[_Window]) -> list[Tensor]:
        """Return (T, K + 1) for each window: every head's log-probabilities of its tokens, and the cosine."""
        tokens = observe(model, passes.mixed_precision, [window.ids for window in batch])
        said_CBT = torch.cat([tokens.log_probs_KBT, tokens.cosine_BT.unsqueeze(0)])
        return [said_CBT[:, row, : len(window.ids) - 1].T for row, window in enumerate(batch)]

    said_CT: dict[int, Tensor] = {}
    for window, said_TC in shared_out(batches, share, observe_windows):
        whole_CT = said_CT.setdefault(
            window.document, torch.empty(said_TC.shape[1], sizes[window.document])
        )
        whole_CT[:, window.start : window.start + len(said_TC)] = said_TC.T
    return [
        (index, TokenLogProbs(said_CT[index][:-1, None], said_CT[index][-1:])) for index in sizes
    ]


def observe(model: HeadedModel, mixed_precision: str, rows: Sequence[Tensor]) -> TokenLogProbs:
    """Return the heads' log-probabilities of the tokens of rows, from the second on; shorter rows are padded."""
    # Padding is on the right, where causal attention keeps it out of every real position.
    ids = pad_sequence(list(rows), batch_first=True).to(next(model.parameters()).device)
    with torch.no_grad(), autocast(ids.device.type, mixed_precision):
        return token_log_probs(model, ids[:, :-1], ids[:, 1:])


def _windows(corpus: TokenisedCorpus, index: int, sequence_length: int) -> Iterator[_Window]:
    ids = torch.from_numpy(corpus.document(index).astype(np.int64))
    if corpus.markers.bos is None and corpus.markers.context is not None:
        ids = torch.cat([torch.tensor([corpus.markers.context]), ids])
    for start in range(0, len(ids) - 1, sequence_length):
        yield _Window(index, start, ids[start : start + sequence_length + 1])
