"""The posterior router of a server that keeps its KV cache in blocks: its state is one row for each block.

A server computes many documents at once, each in pieces, may begin in the middle of one (the beginning is cached), and
may throw one away and compute it again. The KV cache is right under all that since a document finds its past through
its blocks. So does the router here: the row of a block holds what the last token written in it left, and a token reads
the row of the block in which the token before it lies. What is cached ends at the end of a block, so a document that
begins there finds what it needs.

Nothing here waits for the device in a step in which every document has one token, and all its tensors lie where they
lay in the step before: such a step can be recorded as a graph and played again.

Shapes: K heads, T tokens of a step, R documents of a step, N blocks (and a row for scrap), B blocks of one document,
D channels, V vocabulary, or one device's share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_WORDS_ALIGNED = 4  # rows that start at multiples of 16 bytes are multiplied faster


class Heads(Protocol):
    """What a router asks of the vocabulary heads."""

    def observe(self, rows_TD: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) logits of `ids_T`, and (T, K) log-sum-exps of all logits, with a product of the heads."""

    def logits_of(self, rows_TD: Tensor, ids_T: Tensor) -> Tensor:
        """Return (T, K) logits of `ids_T`, without the logits of the others where that can be had."""


@dataclass(frozen=True)
class Step:
    """The tokens of one step, one document's after another's, and where their documents lie."""

    ids_T: Tensor  # the tokens
    positions_T: Tensor  # of each in its document
    slots_T: Tensor  # of each, its block times the block size plus its place there; negative for padding
    blocks_RB: Tensor  # the blocks of every document
    starts_R: Tensor  # the first token of every document here, and after them the number of all
    longest: int  # the most tokens that a document has here
    block_size: int  # tokens in a block


class BlockRouter(nn.Module):
    """One row of state for each block, and what a step makes of it; `log_prior` (K,) is float64."""

    log_prior_K: Tensor
    transition_KK: Tensor
    hidden_ND: Tensor
    sizes_NK: Tensor
    log_weights_NK: Tensor

    def __init__(self, log_prior: Tensor, switch_rate: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("log_prior_K", log_prior, persistent=False)
        # Every token mixes the weights anew: w <- (1 - alpha) w + alpha prior, a product with this matrix.
        shared_KK = switch_rate * log_prior.exp()[:, None].expand(-1, len(log_prior))
        stays_KK = (1.0 - switch_rate) * torch.eye(len(log_prior), dtype=log_prior.dtype, device=log_prior.device)
        self.register_buffer("transition_KK", (stays_KK + shared_KK).log(), persistent=False)
        self.allocate(0, 0, torch.float32)

    @property
    def num_blocks(self) -> int:
        """How many blocks have a row."""
        return len(self.sizes_NK) - 1

    def allocate(self, num_blocks: int, width: int, dtype: torch.dtype) -> None:
        """Make an empty row for each block, and one for what nobody reads."""
        rows, heads, device = num_blocks + 1, len(self.log_prior_K), self.log_prior_K.device
        self.register_buffer("hidden_ND", torch.zeros(rows, width, dtype=dtype, device=device), persistent=False)
        self.register_buffer("sizes_NK", torch.zeros(rows, heads, device=device), persistent=False)
        self.register_buffer("log_weights_NK", self.log_prior_K.repeat(rows, 1), persistent=False)

    def advance(self, hidden_TD: Tensor, step: Step, heads: Heads) -> tuple[Tensor, Tensor]:
        """Weigh the heads after each token of a step, and keep what the documents' next tokens will ask for.

        Returns:
            (T, K) log-weights with which the token after each is predicted, and (T,) the row that waits for the
            log-sum-exps of a token's logits (see `remember`), or that of scrap.
        """
        scrap, size = self.num_blocks, step.block_size
        at_T = torch.arange(len(step.ids_T), dtype=step.starts_R.dtype, device=hidden_TD.device)
        document_T = torch.searchsorted(step.starts_R, at_T, right=True).sub_(1).clamp_(0, len(step.blocks_RB) - 1)
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
        start_TK = torch.where(fresh_T[:, None], self.log_prior_K, self.log_weights_NK[before_T])[at_T - since_T]
        log_weights_TK = self._weigh(evidence_TK, start_TK, since_T, step.longest)

        last_T = at_T == step.starts_R[document_T + 1] - 1
        kept_T = torch.where(last_T | (place_T == size - 1), here_T, scrap).long()
        self.hidden_ND[kept_T] = hidden_TD
        self.log_weights_NK[kept_T] = log_weights_TK
        if step.longest > 1:  # of a document's last token here, `remember` tells them
            self.sizes_NK[kept_T] = sizes_TK.roll(-1, dims=0)
        return log_weights_TK, torch.where(last_T, kept_T, scrap)

    def remember(self, rows: Tensor, sizes_RK: Tensor) -> None:
        """Put the log-sum-exps of some tokens' logits into the rows that `advance` named."""
        self.sizes_NK[rows] = sizes_RK

    def _weigh(self, evidence_TK: Tensor, start_TK: Tensor, since_T: Tensor, longest: int) -> Tensor:
        """Return the log-weights after each token, `since_T` after the first of its document here.

        A token is a matrix that the weights are multiplied with, so those of a document's tokens are multiplied in
        about log2(longest) rounds. Weights that no head is left with start over at the prior, as in model/routing.py.
        """
        evidence_TK = torch.where(evidence_TK.isnan(), -torch.inf, evidence_TK)
        evidence_TK = torch.where((evidence_TK == -torch.inf).all(dim=-1, keepdim=True), 0.0, evidence_TK)
        tokens_TKK = self.transition_KK + evidence_TK[:, None, :]
        log_weights_TK = _multiply(_products(tokens_TKK, since_T, longest), start_TK[:, :, None])[:, :, 0]
        if longest == 1:
            return self._normalise(log_weights_TK)
        while (lost_T := (log_weights_TK == -torch.inf).all(dim=-1)).any():
            first_T = lost_T & ~(lost_T.roll(1) & (since_T > 0))
            tokens_TKK = torch.where(first_T[:, None, None], self.log_prior_K[:, None], tokens_TKK)
            log_weights_TK = _multiply(_products(tokens_TKK, since_T, longest), start_TK[:, :, None])[:, :, 0]
        return self._normalise(log_weights_TK)

    def _normalise(self, log_weights_TK: Tensor) -> Tensor:
        normalised_TK = log_weights_TK - torch.logsumexp(log_weights_TK, dim=-1, keepdim=True)
        return torch.where(normalised_TK.isnan(), self.log_prior_K, normalised_TK)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices of which, and of whose product, the logarithms are held."""
    return torch.logsumexp(left[..., :, :, None] + right[..., None, :, :], dim=-2)


def _products(tokens_TKK: Tensor, since_T: Tensor, longest: int) -> Tensor:
    """Return at each token the product of the matrices of its document's tokens here up to it."""
    shift = 1
    while shift < longest:
        joined = _multiply(tokens_TKK[shift:], tokens_TKK[:-shift])
        within = (since_T[shift:] >= shift)[:, None, None]
        tokens_TKK = torch.cat([tokens_TKK[:shift], torch.where(within, joined, tokens_TKK[shift:])])
        shift *= 2
    return tokens_TKK


def attach_state(hidden_TD: Tensor, log_weights_TK: Tensor, rows_T: Tensor) -> Tensor:
    """Return the hidden rows with more channels, which hold the bits of the weights and of the row to write to.

    A server picks rows out of them, and knows of nothing else that belongs to a token.
    """
    words = torch.cat([log_weights_TK.float().view(torch.int32), rows_T.int()[:, None]], dim=-1)
    words = nn.functional.pad(words, (0, -words.shape[-1] % _WORDS_ALIGNED))
    return torch.cat([hidden_TD, words.view(hidden_TD.dtype)], dim=-1)


def detach_state(rows: Tensor, width: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attach_state` was given: hidden rows of `width` channels, log-weights, rows to write to."""
    words = rows[:, width:].contiguous().view(torch.int32)
    return rows[:, :width], words[:, :num_heads].contiguous().view(torch.float32), words[:, num_heads].long()
