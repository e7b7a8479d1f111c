"""The posterior router of a server that keeps its KV cache in blocks: its state is one row for each
block.

A server computes many documents at once, each in parts. It may begin in the middle of a document
(the beginning is cached), or drop one and compute it again. The KV cache stays right because a
document finds its past through its blocks. The router does the same: a block's row holds the state
after the last token written to that block, and a token reads the row of the block that holds the
token before it. Cached text ends at the end of a block, so a document that continues there finds
its state.

In a step with one token per document, nothing here waits for the device, and all tensors keep their
addresses. So such a step can be recorded as a graph and replayed.

The state is the evidence alone, a number for each document: ln of the trained head's probability of
its text over the base head's. Two documents that begin alike may have priors of their own, and yet
share cached blocks. A document's prior is added where its weights are read.

Shapes: T tokens of a step, R documents of a step, N blocks (and a scrap row), B blocks of one
    document, P positions of a document, D channels; 2: the base head and the trained one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_WORDS = 4  # of 32 bits, for a row's state: products are faster if rows start at 16 bytes


class Heads(Protocol):
    """Interface of the vocabulary heads that the router needs."""

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, 2) logits of `ids_T` and (T, 2) log-sum-exps of all logits, by a full product
        with the heads.
        """

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, 2) logits of `ids_T`, without computing other tokens' logits if possible."""


@dataclass(frozen=True)
class Step:
    """The tokens of one step, document after document, and the cache blocks of their documents."""

    ids_T: Tensor  # the tokens
    positions_T: Tensor  # position of each token in its document
    # of each token: its block times the block size, plus its place there; negative for padding
    slots_T: Tensor
    blocks_RB: Tensor  # the blocks of every document
    # index of the first token of every document in this step, then the number of all tokens
    starts_R: Tensor
    longest: int  # the largest number of tokens that a document has in this step
    block_size: int  # tokens in a block
    prior_R: Tensor  # of every document: the log-odds of the trained head before its first token
    judged_RP: Tensor  # of every document: whether its token at a position counts as evidence


@dataclass(frozen=True)
class Places:
    """Where each token of a step stands: in its document, and among the rows of router state."""

    document_T: Tensor  # index of its document in the step
    since_T: Tensor  # tokens of its document that precede it in this step; 0 for padding
    is_new_T: Tensor  # no token precedes it at all: it begins its document, or is padding
    is_last_T: Tensor  # it is its document's last one in this step
    read_T: Tensor  # row of the token before it
    # Its own row if a later step or document may continue there: it ends its document's part of
    # this step, or its block; else the scrap row.
    written_T: Tensor


def places_of(step: Step, scrap_row: int) -> Places:
    """Find each token's document by its index in the step, and its rows by the document's blocks."""
    size = step.block_size
    starts_R = step.starts_R
    index_T = torch.arange(len(step.ids_T), dtype=starts_R.dtype, device=starts_R.device)
    document_T = torch.searchsorted(starts_R, index_T, right=True).sub_(1)
    document_T = document_T.clamp_(0, len(step.blocks_RB) - 1)
    is_padding_T = step.slots_T < 0
    is_new_T = is_padding_T | (step.positions_T == 0)
    is_last_T = index_T == starts_R[document_T + 1] - 1

    own_row_T = torch.where(is_padding_T, scrap_row, step.slots_T // size)
    place_T = step.positions_T % size  # within its block
    block_before_T = step.blocks_RB[document_T, (step.positions_T // size - 1).clamp(min=0)]
    read_T = torch.where(place_T > 0, own_row_T, block_before_T)
    return Places(
        document_T=document_T,
        since_T=torch.where(is_padding_T, 0, index_T - starts_R[document_T]),
        is_new_T=is_new_T,
        is_last_T=is_last_T,
        read_T=torch.where(is_new_T, scrap_row, read_T).long(),
        written_T=torch.where(is_last_T | (place_T == size - 1), own_row_T, scrap_row).long(),
    )


class BlockRouter(nn.Module):
    """One row of router state for each block, updated by every step."""

    hidden_ND: Tensor
    sizes_N2: Tensor
    evidence_N: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.allocate(0, 0, torch.float32, torch.device("cpu"))

    @property
    def scrap_row(self) -> int:
        """The row behind those of all blocks; it holds nothing that counts."""
        return len(self.evidence_N) - 1

    def allocate(
        self, num_blocks: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make an empty row for each block, and the scrap row."""
        rows = num_blocks + 1
        for name, tensor in (
            ("hidden_ND", torch.zeros(rows, width, dtype=dtype, device=device)),
            # Named, since torch's default is the model's dtype while vLLM makes the model.
            ("sizes_N2", torch.zeros(rows, 2, dtype=torch.float32, device=device)),
            ("evidence_N", torch.zeros(rows, dtype=torch.float64, device=device)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def advance(self, hidden_TD: Tensor, step: Step, heads: Heads) -> tuple[Tensor, Tensor]:
        """Weigh the heads after each token of a step, and store the state for the documents' next
        tokens.

        Returns: (T,) log-odds of the trained head for predicting the token after each one, and (T,)
            the row that expects the log-sum-exps of each token's logits (see `remember`), or the
            scrap row.
        """
        places = places_of(step, self.scrap_row)
        is_first_T = places.since_T == 0  # of its document in this step
        is_decoding = step.longest == 1

        if is_decoding:
            logits_T2 = heads.logits_of(self.hidden_ND[places.read_T], step.ids_T)
            sizes_T2 = self.sizes_N2[places.read_T]
        else:
            before_TD = torch.where(
                is_first_T[:, None], self.hidden_ND[places.read_T], hidden_TD.roll(1, dims=0)
            )
            logits_T2, sizes_T2 = heads.observe(before_TD, step.ids_T)

        is_silent_T = places.is_new_T | ~step.judged_RP[places.document_T, step.positions_T]
        ratios_T = torch.where(is_silent_T, 0.0, _log_ratios(logits_T2 - sizes_T2))
        start_T = torch.where(places.is_new_T, 0.0, self.evidence_N[places.read_T])
        evidence_T = torch.where(is_first_T, _zero_for_nan(start_T + ratios_T), ratios_T)
        if not is_decoding:
            evidence_T = _sums(evidence_T, places.since_T, step.longest)

        self.hidden_ND[places.written_T] = hidden_TD
        self.evidence_N[places.written_T] = evidence_T
        if not is_decoding:  # for a document's last token in this step, `remember` sets them
            self.sizes_N2[places.written_T] = sizes_T2.roll(-1, dims=0)
        log_odds_T = step.prior_R[places.document_T] + evidence_T
        return log_odds_T, torch.where(places.is_last_T, places.written_T, self.scrap_row)

    def remember(self, rows_T: Tensor, sizes_T2: Tensor) -> None:
        """Write the log-sum-exps of some tokens' logits into the rows that `advance` returned."""
        self.sizes_N2[rows_T] = sizes_T2


def _log_ratios(log_probs_T2: Tensor) -> Tensor:
    """Return (T,) the evidence of tokens; none if both heads give zero or are broken."""
    log_probs_T2 = log_probs_T2.double()
    base_T, trained_T = torch.where(log_probs_T2.isnan(), -torch.inf, log_probs_T2).unbind(dim=-1)
    return _zero_for_nan(trained_T - base_T)


def _zero_for_nan(evidence_T: Tensor) -> Tensor:
    """Return evidence that starts over where both heads have given probability zero, as in
    model/routing.py: infinite evidence for each is not a number.
    """
    return torch.where(evidence_T.isnan(), 0.0, evidence_T)


def _sums(terms_T: Tensor, since_T: Tensor, longest: int) -> Tensor:
    """Return the evidence after each token: the sum of its document's terms, the first of which is
    `since_T` tokens back.

    One sum over all tokens will not do: after a zero probability, differences of sums are not
    numbers. So sums over 2, 4, 8, ... tokens are added, in log2(longest) rounds.
    """
    index_T = torch.arange(len(since_T), device=since_T.device)
    since_restart_T = since_T
    while True:
        sums_T = terms_T
        shift = 1
        while shift < longest:
            within_T = since_restart_T[shift:] >= shift
            added_T = torch.where(within_T, sums_T[:-shift], 0.0)
            sums_T = torch.cat([sums_T[:shift], sums_T[shift:] + added_T])
            shift *= 2
        lost_T = sums_T.isnan()
        if not lost_T.any():
            return sums_T
        # The first lost token of a document begins its sums anew.
        first_T = lost_T & ~(lost_T.roll(1) & (since_restart_T > 0))
        terms_T = torch.where(first_T, 0.0, terms_T)
        begins_T = first_T | (since_restart_T == 0)
        since_restart_T = index_T - torch.where(begins_T, index_T, 0).cummax(dim=0).values


def attach_state(hidden_TD: Tensor, log_odds_T: Tensor, rows_T: Tensor) -> Tensor:
    """Return the hidden rows with extra channels that hold the bits of the log-odds and of the row
    to write to.

    A server selects rows of this tensor, and carries no other data per token.
    """
    words_T2 = torch.stack([log_odds_T.float().view(torch.int32), rows_T.int()], dim=-1)
    words_TW = nn.functional.pad(words_T2, (0, _WORDS - 2))
    return torch.cat([hidden_TD, words_TW.view(hidden_TD.dtype)], dim=-1)


def detach_state(rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `attach_state`: hidden rows of `width` channels, log-odds, rows to
    write to.
    """
    words_TW = rows[:, width:].contiguous().view(torch.int32)
    return rows[:, :width], words_TW[:, 0].contiguous().view(torch.float32), words_TW[:, 1].long()
