"""What each head, and each routing rule, pays for every document of a corpus.

One pass of the widened model gives, for every token, the log-probability of both heads and the cosine of their logits;
both routing rules follow from those numbers, so they cost nothing more and can be compared on the very same pass. A
document longer than the context is scored in windows, each starting with the last token of the one before; the
router's weight carries over, so the posterior bound holds for the whole document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from scale_cli.config.schema import RouterConfig
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import CorpusError
from scale_cli.model.observing import Observable, TwoHeaded
from scale_cli.model.routing import cosine_serves_base, log_prior, mix_log_probs, posterior_log_weights
from scale_cli.processes import ALONE, Share, gathered

# Documents whose windows are sorted by length together, so that little of a batch is padding.
_DOCUMENTS_AT_ONCE = 256

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentLosses:
    """Per document, all arrays (documents,)."""

    num_tokens: Values  # scored tokens: the document's and its closing boundary
    num_bytes: Values  # UTF-8 bytes of the text
    base: Values  # nats, base head
    adapted: Values  # nats, adaptation head
    posterior: Values  # nats, routed by the posterior rule
    cosine: Values  # nats, routed by the cosine rule
    posterior_base_share: Values  # tokens served by the base head under the posterior rule (its weight, summed)
    cosine_base_share: Values  # tokens served by the base head under the cosine rule


@dataclass(frozen=True)
class ObservedDocument:
    """What the heads said of one document's tokens."""

    index: int  # of the document in its corpus
    log_probs_KT: Tensor  # (heads, tokens) of the base head, ..., the trained one, nats
    cosine_T: Tensor  # (tokens,) of the logits of the first and the last


@dataclass(frozen=True)
class _Window:
    """Some consecutive tokens of one document: inputs, and the tokens that follow them."""

    document: int
    start: int
    input_ids: npt.NDArray[np.int64]
    next_ids: npt.NDArray[np.int64]


def score_corpus(
    model: TwoHeaded,
    corpus: TokenisedCorpus,
    router: RouterConfig,
    *,
    sequence_length: int,
    batch_size: int,
    mixed_precision: str,
    max_documents: int | None = None,
    progress: str | None = None,
    share: Share = ALONE,
) -> DocumentLosses:
    """Score the documents of a corpus.

    Args:
        model: in evaluation mode.
        corpus: what is scored.
        router: settings of both rules, whatever the model serves.
        sequence_length: tokens a window.
        batch_size: windows at once.
        mixed_precision: `no` | `bf16`.
        max_documents: only the first so many.
        progress: what to call it on a progress bar; None for no bar.
        share: of the work, that is this process's; every one of them returns the whole.
    """
    num_documents = min(len(corpus), max_documents or len(corpus))
    rows: list[tuple[float, ...]] = []
    with tqdm(total=num_documents, desc=progress, unit=" docs", disable=progress is None, leave=False) as bar:
        for first in range(0, num_documents, _DOCUMENTS_AT_ONCE):
            documents = range(first, min(first + _DOCUMENTS_AT_ONCE, num_documents))
            observed = observe_documents(model, corpus, documents, sequence_length, batch_size, mixed_precision, share)
            rows.extend(_document_row(document, corpus.num_bytes[document.index], router) for document in observed)
            bar.update(len(documents))
    if not rows:
        raise CorpusError(f"{corpus.folder.name}: no document has a token that could be scored")
    columns = np.asarray(rows, dtype=np.float64).T
    return DocumentLosses(**{field.name: column for field, column in zip(fields(DocumentLosses), columns, strict=True)})


def _document_row(document: ObservedDocument, num_bytes: int, router: RouterConfig) -> tuple[float, ...]:
    """Return one document's values, in the order of DocumentLosses' fields."""
    prior_K = log_prior(router.prior)
    log_probs_KBT = document.log_probs_KT.double().unsqueeze(1)
    log_weights_KBS = posterior_log_weights(log_probs_KBT, prior_K[:, None], prior_K, router.switch_rate)[..., :-1]
    serves_base_T = cosine_serves_base(document.cosine_T, router.threshold)
    base_T, adapted_T = document.log_probs_KT.double()
    return (
        len(document.cosine_T),
        float(num_bytes),
        -base_T.sum().item(),
        -adapted_T.sum().item(),
        -mix_log_probs(log_weights_KBS, log_probs_KBT).sum().item(),
        -torch.where(serves_base_T, base_T, adapted_T).sum().item(),
        log_weights_KBS[0].exp().sum().item(),
        serves_base_T.sum().item(),
    )


def observe_documents(
    model: Observable,
    corpus: TokenisedCorpus,
    documents: range,
    sequence_length: int,
    batch_size: int,
    mixed_precision: str,
    share: Share = ALONE,
) -> list[ObservedDocument]:
    """Return what the heads said of every token of some documents, each scored window by window.

    Windows are put into batches before the batches are shared out, so the figures do not hang on how many share them.

    Args:
        model: in evaluation mode.
        corpus: where the documents are.
        documents: their indices.
        sequence_length: tokens a window.
        batch_size: windows at once.
        mixed_precision: `no` | `bf16`.
        share: of the batches, that is this process's; every one of them returns all documents.
    """
    windows = [window for index in documents for window in _windows(corpus, index, sequence_length)]
    sizes = {window.document: window.start + len(window.next_ids) for window in windows}  # the last one's end
    windows.sort(key=lambda window: (-len(window.input_ids), window.document, window.start))
    batches = [windows[first : first + batch_size] for first in range(0, len(windows), batch_size)]
    if len(batches) < share.num_processes:
        share = ALONE  # everyone does everything: a process without a batch would not know how many heads there are
    shares = [batches[place :: share.num_processes] for place in range(share.num_processes)]
    said = [row for batch in shares[share.index] for row in _observe_batch(model, batch, mixed_precision)]
    if not said:
        return []
    lengths = [sum(len(window.next_ids) for batch in of_one for window in batch) for of_one in shares]
    observed: dict[int, ObservedDocument] = {}
    for of_one, said_TC in zip(shares, gathered(torch.cat(said), lengths), strict=True):
        start = 0
        for window in (window for batch in of_one for window in batch):
            stop = start + len(window.next_ids)
            _keep(observed, sizes, window, said_TC[start:stop])
            start = stop
    return [observed[index] for index in sizes]


def _observe_batch(model: Observable, batch: list[_Window], mixed_precision: str) -> list[Tensor]:
    """Return (T, K + 1) for each window: what every head said of its tokens, and the cosine."""
    device = next(model.parameters()).device
    input_ids, next_ids = (_padded([getattr(w, name) for w in batch], device) for name in ("input_ids", "next_ids"))
    # Padding stands on the right, where causal attention keeps it out of every real position.
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
        observed = model.observe_tokens(input_ids, next_ids)
    said_CBT = torch.cat([observed.log_probs_KBT, observed.cosine_BT.unsqueeze(0)])
    return [said_CBT[:, row, : len(window.next_ids)].T for row, window in enumerate(batch)]


def _keep(observed: dict[int, ObservedDocument], sizes: dict[int, int], window: _Window, said_TC: Tensor) -> None:
    """Put what was said of a window into its document."""
    index, place = window.document, slice(window.start, window.start + len(window.next_ids))
    if index not in observed:
        num_heads = said_TC.shape[1] - 1
        observed[index] = ObservedDocument(index, torch.empty(num_heads, sizes[index]), torch.empty(sizes[index]))
    observed[index].log_probs_KT[:, place] = said_TC[:, :-1].T
    observed[index].cosine_T[place] = said_TC[:, -1]


def _windows(corpus: TokenisedCorpus, index: int, sequence_length: int) -> Iterator[_Window]:
    ids = corpus.document(index).astype(np.int64)
    if corpus.boundaries.bos is None and corpus.boundaries.context is not None:
        ids = np.concatenate([[corpus.boundaries.context], ids])
    for start in range(0, len(ids) - 1, sequence_length):
        stop = min(start + sequence_length, len(ids) - 1)
        yield _Window(index, start, ids[start:stop], ids[start + 1 : stop + 1])


def _padded(rows: list[npt.NDArray[np.int64]], device: torch.device) -> Tensor:
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device)
