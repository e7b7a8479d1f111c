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

Shapes: K heads, T tokens of a step, R documents of a step, N blocks (and a scrap row), B blocks of
    one document,
D channels, V vocabulary, or one device's share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_WORDS_ALIGNED = 4  # products are faster if rows start at multiples of 16 bytes


class Heads(Protocol):
    """Interface of the vocabulary heads that the router needs."""

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) logits of `ids_T` and (T, K) log-sum-exps of all logits, by a full product
        with the heads.
        """

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, K) logits of `ids_T`, without computing other tokens' logits if possible."""


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


class BlockRouter(nn.Module):
    """One row of router state for each block, updated by every step.

    `log_prior` (K,) is float64.
    """

    log_prior_K: Tensor
    hidden_ND: Tensor
    sizes_NK: Tensor
    log_weights_NK: Tensor

    def __init__(self, log_prior: Tensor) -> None:
        super().__init__()
        self.register_buffer("log_prior_K", log_prior, persistent=False)
        self.allocate(0, 0, torch.float32)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that have a row."""
        return len(self.sizes_NK) - 1

    def allocate(self, num_blocks: int, width: int, dtype: torch.dtype) -> None:
        """Make an empty row for each block, and a scrap row that no token reads."""
        rows = num_blocks + 1
        heads = len(self.log_prior_K)
        device = self.log_prior_K.device
        self.register_buffer(
            "hidden_ND", torch.zeros(rows, width, dtype=dtype, device=device), persistent=False
        )
        self.register_buffer("sizes_NK", torch.zeros(rows, heads, device=device), persistent=False)
        self.register_buffer("log_weights_NK", self.log_prior_K.repeat(rows, 1), persistent=False)

    def advance(self, hidden_TD: Tensor, step: Step, heads: Heads) -> tuple[Tensor, Tensor]:
        """Weigh the heads after each token of a step, and store the state for the documents' next
        tokens.

        Returns: (T, K) log-weights for predicting the token after each one, and (T,) the row that
            expects the log-sum-exps of each token's logits (see `remember`), or the scrap row.
        """
        scrap = self.num_blocks
        size = step.block_size
        at_T = torch.arange(len(step.ids_T), dtype=step.starts_R.dtype, device=hidden_TD.device)
        document_T = (
            torch.searchsorted(step.starts_R, at_T, right=True)
            .sub_(1)
            .clamp_(0, len(step.blocks_RB) - 1)
        )
        place_T = step.positions_T % size
        padding_T = step.slots_T < 0
        here_T = torch.where(padding_T, scrap, step.slots_T // size)
        earlier_T = step.blocks_RB[document_T, (step.positions_T // size - 1).clamp(min=0)]
        before_T = torch.where(place_T > 0, here_T, earlier_T)
        fresh_T = padding_T | (step.positions_T == 0)
        before_T = torch.where(fresh_T, scrap, before_T).long()

        since_T = torch.where(padding_T, 0, at_T - step.starts_R[document_T])
        if step.longest == 1:
            logits_TK = heads.logits_of(self.hidden_ND[before_T], step.ids_T)
            sizes_TK = self.sizes_NK[before_T]
        else:
            shifted_TD = hidden_TD.roll(1, dims=0)
            earlier_TD = torch.where((since_T == 0)[:, None], self.hidden_ND[before_T], shifted_TD)
            logits_TK, sizes_TK = heads.observe(earlier_TD, step.ids_T)
        evidence_TK = torch.where(fresh_T[:, None], 0.0, (logits_TK - sizes_TK).double())
        start_TK = torch.where(fresh_T[:, None], self.log_prior_K, self.log_weights_NK[before_T])[
            at_T - since_T
        ]
        log_weights_TK = self._weigh(evidence_TK, start_TK, since_T, step.longest)

        last_T = at_T == step.starts_R[document_T + 1] - 1
        kept_T = torch.where(last_T | (place_T == size - 1), here_T, scrap).long()
        self.hidden_ND[kept_T] = hidden_TD
        self.log_weights_NK[kept_T] = log_weights_TK
        if step.longest > 1:  # for a document's last token in this step, `remember` sets them
            self.sizes_NK[kept_T] = sizes_TK.roll(-1, dims=0)
        return log_weights_TK, torch.where(last_T, kept_T, scrap)

    def remember(self, rows: Tensor, sizes_RK: Tensor) -> None:
        """Write the log-sum-exps of some tokens' logits into the rows that `advance` returned."""
        self.sizes_NK[rows] = sizes_RK

    def _weigh(
        self, evidence_TK: Tensor, start_TK: Tensor, since_T: Tensor, longest: int
    ) -> Tensor:
        """Return the log-weights after each token; `since_T` counts from the document's first token
        in this step.

        They are sums of evidence within each document. If every head's weight is zero, the weights
        restart at the prior, as in model/routing.py.
        """
        evidence_TK = torch.where(evidence_TK.isnan(), -torch.inf, evidence_TK)
        silent_T1 = (evidence_TK == -torch.inf).all(dim=-1, keepdim=True)
        evidence_TK = torch.where(silent_T1, 0.0, evidence_TK)
        evidence_TK = torch.where((since_T == 0)[:, None], start_TK + evidence_TK, evidence_TK)
        if longest == 1:
            return self._normalise(evidence_TK)

        at_T = torch.arange(len(since_T), device=since_T.device)
        while True:
            log_weights_TK = _sums(evidence_TK, since_T, longest)
            lost_T = (log_weights_TK == -torch.inf).all(dim=-1)
            if not lost_T.any():
                return self._normalise(log_weights_TK)
            # The first lost token of a document begins its sums anew.
            first_T = lost_T & ~(lost_T.roll(1) & (since_T > 0))
            evidence_TK = torch.where(first_T[:, None], self.log_prior_K, evidence_TK)
            since_T = at_T - torch.where(first_T | (since_T == 0), at_T, 0).cummax(dim=0).values

    def _normalise(self, log_weights_TK: Tensor) -> Tensor:
        normalised_TK = log_weights_TK - torch.logsumexp(log_weights_TK, dim=-1, keepdim=True)
        return torch.where(normalised_TK.isnan(), self.log_prior_K, normalised_TK)


def _sums(evidence_TK: Tensor, since_T: Tensor, longest: int) -> Tensor:
    """Return, at each token, the sum of the evidence since `since_T` tokens ago; it takes
    log2(longest) rounds.

    One sum over all tokens will not do: after a zero probability, differences of sums are not
      numbers.
    """
    shift = 1
    while shift < longest:
        within = (since_T[shift:] >= shift)[:, None]
        added = torch.where(within, evidence_TK[:-shift], 0.0)
        evidence_TK = torch.cat([evidence_TK[:shift], evidence_TK[shift:] + added])
        shift *= 2
    return evidence_TK


def attach_state(hidden_TD: Tensor, log_weights_TK: Tensor, rows_T: Tensor) -> Tensor:
    """Return the hidden rows with extra channels that hold the bits of the log-weights and of the
    row to write to.

    A server selects rows of this tensor, and carries no other data per token.
    """
    words = torch.cat([log_weights_TK.float().view(torch.int32), rows_T.int()[:, None]], dim=-1)
    words = nn.functional.pad(words, (0, -words.shape[-1] % _WORDS_ALIGNED))
    return torch.cat([hidden_TD, words.view(hidden_TD.dtype)], dim=-1)


def detach_state(rows: Tensor, width: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `attach_state`: hidden rows of `width` channels, log-weights, rows to
    write to.
    """
    words = rows[:, width:].contiguous().view(torch.int32)
    return (
        rows[:, :width],
        words[:, :num_heads].contiguous().view(torch.float32),
        words[:, num_heads].long(),
    )
