"""Which head answers: Bayesian averaging of the heads (ours), or the cosine of their logits (the paper's).

Shapes: K heads (0 is the base), B batch, T tokens, V vocabulary.

The posterior rule judges each head by how well it predicted the tokens seen so far:

    p_t = sum_k w_k,t p_k(. | x_<t)        w_k,t+1 proportional to w_k,t p_k(x_t | x_<t)

so that on every document loss(routed) <= min_k (loss_k - ln prior_k), whatever was trained: with two heads and an even
prior at most ln 2 nats more than the better one, with a prior of 0.9 at most 0.11 more than the base head and 2.30 more
than the other. With a switch rate alpha > 0 a share alpha of the weight returns to the prior at every token, which lets
the router change its mind within a document, at a cost that may grow with its length.

That is of a whole document, from its first token. Of a continuation after a context (a benchmark's choice, a prompt's
completion) it says nothing: the weights are those that the context has left.

Sources: Vovk 1998 (the aggregating algorithm); Herbster & Warmuth 1998, "Tracking the best expert" (fixed share);
SCALE, arXiv 2511.03270 (the cosine rule).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Of a head's logits; a head gone astray says more, and beside it float32 would round away what the others say.
_LARGEST_SIZE = 256.0


def head_log_probs(logits: Tensor) -> Tensor:
    """Return log-probabilities in which a non-finite prediction counts as probability zero.

    Args:
        logits: (..., V); a row with a NaN or a positive infinity in it has broken and gets -inf throughout.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return torch.where(torch.isnan(log_probs), -torch.inf, log_probs)


def observed_log_probs(logits_BTV: Tensor, next_ids_BT: Tensor) -> Tensor:
    """Return (B, T): what `head_log_probs` gives the token that came, without the (B, T, V) of the others."""
    said = logits_BTV.gather(-1, next_ids_BT.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits_BTV, dim=-1)
    return torch.where(torch.isnan(said), -torch.inf, said)


def log_prior(base_prior: float, num_heads: int = 2, device: torch.device | None = None) -> Tensor:
    """Return (K,) log-weights: `base_prior` for the base head, the rest shared evenly by the others."""
    weights = [base_prior] + [(1.0 - base_prior) / (num_heads - 1)] * (num_heads - 1)
    return torch.tensor(weights, dtype=torch.float64, device=device).log()


def posterior_log_weights(log_probs_KBT: Tensor, start_KB: Tensor, prior_K: Tensor, switch_rate: float = 0.0) -> Tensor:
    """Return the log-weights before each token and after the last one.

    Args:
        log_probs_KBT: what each head gave the token that came, natural logarithm; -inf and NaN are allowed and
            count as probability zero. Where every head says zero the token says nothing about them and is skipped.
        start_KB: log-weights before the first token (`prior_K` for a new document, the last result for the next
            window of the same one).
        prior_K: where weight is shared back to, and where it starts over once every head has failed.
        switch_rate: alpha; 0 needs no loop over tokens, unless every head has failed.

    Returns:
        (K, B, T + 1) in float64, each column normalised.
    """
    evidence_KBT = log_probs_KBT.double()
    evidence_KBT = torch.where(torch.isnan(evidence_KBT), -torch.inf, evidence_KBT)
    evidence_KBT = torch.where((evidence_KBT == -torch.inf).all(dim=0), 0.0, evidence_KBT)
    start_KB = start_KB.double()
    if switch_rate == 0.0 and evidence_KBT.shape[-1] > 1:
        sums_KBS = torch.cat([start_KB.unsqueeze(-1), evidence_KBT], dim=-1).cumsum(dim=-1)
        # Once every head has failed, each at its own token, a sum cannot start over; the loop below can.
        if not (sums_KBS == -torch.inf).all(dim=0).any():
            return _normalise(sums_KBS, prior_K[:, None, None])
    weights = [_normalise(start_KB, prior_K[:, None])]
    for evidence_KB in evidence_KBT.unbind(dim=-1):
        updated_KB = _normalise(weights[-1] + evidence_KB, prior_K[:, None])
        if switch_rate > 0.0:
            share_KB = (prior_K[:, None] + math.log(switch_rate)).expand_as(updated_KB)
            updated_KB = torch.logaddexp(updated_KB + math.log1p(-switch_rate), share_KB)
        weights.append(updated_KB)
    return torch.stack(weights, dim=-1)


def _normalise(log_weights: Tensor, prior: Tensor) -> Tensor:
    normalised = log_weights - torch.logsumexp(log_weights, dim=0, keepdim=True)
    return torch.where(torch.isnan(normalised), prior, normalised)


def mix_log_probs(log_weights: Tensor, log_probs: Tensor) -> Tensor:
    """Return the log-probability of the mixture over the heads, dimension 0 of both arguments."""
    log_probs = torch.where(torch.isnan(log_probs), -torch.inf, log_probs)
    return torch.logsumexp(log_weights + log_probs, dim=0)


def mix_logits(log_weights: Tensor, logits: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return scores (..., V) whose softmax is the mixture over the heads, dimension 0, and whose size is a logit's.

    To the mixture's log-probabilities is added sum_k w_k lse_k, with lse_k the log-sum-exp of head k's logits: a
    constant of the position, so the distribution stays, and with all weight on one head the scores are its logits.
    What scales scores by their sign (a repetition penalty) acts on them as on a plain model's; on log-probabilities,
    of which the likely ones are near 0, it would hardly act.

    Args:
        log_weights: (K, ...).
        logits: (K, ..., V); a head with a NaN or a positive infinity at a position has broken and has no say there.
        sizes: (K, ...), their log-sum-exps where they are known already.
    """
    logits = logits.float()
    sizes = torch.logsumexp(logits, dim=-1) if sizes is None else sizes
    sound = sizes.isfinite()
    log_weights = torch.where(sound, log_weights, -torch.inf)
    log_weights = torch.where(sound, log_weights - torch.logsumexp(log_weights, dim=0), -torch.inf)
    bounded = torch.where(sound, sizes.clamp(-_LARGEST_SIZE, _LARGEST_SIZE), 0.0)
    size = (log_weights.exp() * bounded).sum(dim=0)
    weighted = logits - sizes.unsqueeze(-1) + (log_weights + size).float().unsqueeze(-1)
    return functools.reduce(torch.logaddexp, torch.where(sound.unsqueeze(-1), weighted, -torch.inf).unbind())


def logit_cosine(base: Tensor, adapted: Tensor) -> Tensor:
    """Return the cosine of two logit vectors (..., V); NaN where either is zero or not finite."""
    base, adapted = base.float(), adapted.float()
    norms = torch.linalg.vector_norm(base, dim=-1) * torch.linalg.vector_norm(adapted, dim=-1)
    return torch.linalg.vecdot(base, adapted) / norms


def cosine_serves_base(cosine: Tensor, threshold: float) -> Tensor:
    """Return where the paper's rule answers with the base head: cos >= tau, or no cosine at all (a broken head)."""
    return ~(cosine < threshold)
