"""The router: Bayesian averaging of the heads (ours), or a choice by the cosine of their logits
(the paper's).

Shapes: K = 2 heads (0 is the base), B batch, T tokens, V vocabulary.

The posterior rule judges each head by how well it predicted the tokens seen so far:

    p_t = sum_k w_k,t p_k(. | x_<t)        w_k,t+1 proportional to w_k,t p_k(x_t | x_<t)

Therefore, on every document, loss(routed) <= min_k (loss_k - ln prior_k), whatever was trained.
With an even prior that is at most ln 2 nats more than the better head; with a prior
of 0.9, at most 0.11 more than the base head and 2.30 more than the other.

The bound holds for a whole document, from its first token. It does not hold for a continuation
after a context (a benchmark's choice, a prompt's completion): there the weights start from what the
context has left.

Sources: Vovk 1998 (the aggregating algorithm); SCALE, arXiv 2511.03270 (the cosine rule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits of one head held at once: about as many as a CPU's caches hold, or enough to fill a GPU
# (256 MiB in float32).
LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
# Rows per product, at least, however large the vocabulary: with fewer, most of the time goes into
# reading the head.
FEWEST_ROWS = 128
# Share of a piece's probability that goes to the new tokens beginning with it, if other text begins
# with it too.
_SHARE_OF_OTHERS = 2.0**-20
# Bound on a head's log-sum-exp where scores are shifted by it: with a larger one float32 would
# round the others away.
_LARGEST_SIZE = 256.0


def observed_log_probs(logits_BTV: Tensor, next_ids_BT: Tensor) -> Tensor:
    """Return (B, T): log-probabilities of the observed tokens, without a second (B, T, V) tensor.

    A row with a NaN or a positive infinity is broken: its token has -inf.
    """
    said = logits_BTV.gather(-1, next_ids_BT.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(
        logits_BTV, dim=-1
    )
    return torch.where(torch.isnan(said), -torch.inf, said)


def log_prior(base_prior: float | Tensor, device: torch.device | None = None) -> Tensor:
    """Return log-weights: `base_prior` for the base head, the rest for the trained one.

    They are (K,), or (K, B) for a tensor (B,) with a prior for each document.
    """
    base = torch.as_tensor(base_prior, dtype=torch.float64, device=device)
    return torch.stack([base, 1.0 - base]).log()


def posterior_log_weights(
    log_probs_KBT: Tensor, prior_K: Tensor, start_KB: Tensor | None = None
) -> Tensor:
    """Return the log-weights before each token and after the last one.

    Args:
        log_probs_KBT: each head's log-probability of the observed token, in nats; -inf and NaN are
            allowed and count as probability zero. A token to which every head gives zero is no
            evidence and is skipped.
        prior_K: log-weights of a new document, or (K, B) of each; the weights start over from them
            once every head has given probability zero.
        start_KB: log-weights before the first token, if the document began earlier: the last column
            of the last result.

    Returns:
        (K, B, T + 1) in float64, each column normalised.
    """
    evidence_KBT = log_probs_KBT.double()
    evidence_KBT = torch.where(torch.isnan(evidence_KBT), -torch.inf, evidence_KBT)
    evidence_KBT = torch.where((evidence_KBT == -torch.inf).all(dim=0), 0.0, evidence_KBT)
    prior_KB = prior_K if prior_K.ndim == 2 else prior_K[:, None]
    prior_KB = prior_KB.expand(-1, log_probs_KBT.shape[1])
    start_KB = (prior_KB if start_KB is None else start_KB).double()

    if evidence_KBT.shape[-1] > 1:
        sums_KBS = torch.cat([start_KB.unsqueeze(-1), evidence_KBT], dim=-1).cumsum(dim=-1)
        # Once every head has failed, each at its own token, a sum cannot start over; the loop below
        # can.
        if not (sums_KBS == -torch.inf).all(dim=0).any():
            return _normalise(sums_KBS, prior_KB[..., None])

    weights = [_normalise(start_KB, prior_KB)]
    for evidence_KB in evidence_KBT.unbind(dim=-1):
        weights.append(_normalise(weights[-1] + evidence_KB, prior_KB))
    return torch.stack(weights, dim=-1)


def _normalise(log_weights: Tensor, prior: Tensor) -> Tensor:
    normalised = log_weights - torch.logsumexp(log_weights, dim=0, keepdim=True)
    return torch.where(torch.isnan(normalised), prior, normalised)


def mix_log_probs(log_weights: Tensor, log_probs: Tensor) -> Tensor:
    """Return the log-probabilities of the mixture over the heads, which are dimension 0 of both
    arguments.
    """
    log_probs = torch.where(torch.isnan(log_probs), -torch.inf, log_probs)
    return torch.logsumexp(log_weights + log_probs, dim=0)


def mix_logits(
    log_weights: Tensor, logits: Tensor | Sequence[Tensor], sizes: Tensor | None = None
) -> Tensor:
    """Return scores (..., V) whose softmax is the mixture over the heads, and which are about as
    large as logits.

    The scores are the mixture's log-probabilities plus sum_k w_k lse_k, where lse_k is the
    log-sum-exp of head k's logits. That sum is constant at a position, so the distribution stays;
    with all weight on one head the scores are its logits. A rule that scales scores by their sign
    (a repetition penalty) acts on them as on a plain model's. On log-probabilities, which are near
    0 for likely tokens, it would hardly act.

    Args:
        log_weights: (K, ...).
        logits: (K, ..., V); a head with a NaN or a positive infinity at a position is broken and
            ignored there.
        sizes: (K, ...), their log-sum-exps, if already known. Given these, the logits may cover
            only a part of the vocabulary, so devices that share it need not exchange logits.
    """
    logits = [of_head.float() for of_head in logits]
    sizes = (
        torch.stack([of_head.logsumexp(dim=-1) for of_head in logits]) if sizes is None else sizes
    )
    return mix_shifted(logits, *score_shifts(log_weights, sizes))


def score_shifts(log_weights: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `mix_logits` subtracts from each head's logits, and what it then adds, each (K,
    ...) float32.

    The second is -inf for a broken head. They stay separate because a log-sum-exp may be so large
    that float32 would round the added part away.
    """
    sound = sizes.isfinite()
    log_weights = torch.where(sound, log_weights, -torch.inf)
    log_weights = torch.where(sound, log_weights - torch.logsumexp(log_weights, dim=0), -torch.inf)
    bounded = torch.where(sound, sizes.clamp(-_LARGEST_SIZE, _LARGEST_SIZE), 0.0)
    return sizes.float(), (log_weights + (log_weights.exp() * bounded).sum(dim=0)).float()


def mix_shifted(logits: Sequence[Tensor], taken: Tensor, added: Tensor) -> Tensor:
    """Return the scores (..., V) of `mix_logits` from float32 logits (..., V) and the results of
    `score_shifts`.
    """
    weighted = [
        torch.where(more == -torch.inf, -torch.inf, of_head - size + more)
        for of_head, size, more in zip(
            logits, taken.unsqueeze(-1), added.unsqueeze(-1), strict=True
        )
    ]
    log_of_sum = _log_of_sum if torch.compiler.is_compiling() else torch.logaddexp
    return log_of_sum(*weighted)


def _log_of_sum(left: Tensor, right: Tensor) -> Tensor:
    """Return torch.logaddexp within 1e-7, in half its time once compiled."""
    most = torch.maximum(left, right)
    return torch.where(
        most == -torch.inf, most, most + (1.0 + (torch.minimum(left, right) - most).exp()).log()
    )


class PieceShares:
    """Probabilities of tokens that a head lacks: each gets a share of the probability of its first
    piece.

    Without a share, the head would give probability zero to the first new token of a document and
    lose all its weight for good. A piece's probability is shared between the piece and the new
    tokens that begin with it:

    - evenly, if the piece only ever begins text in the new tokens' script: text without that script
      is unaffected
    - all but 2^-20 to the piece, if it begins other text too (a space): the base's prediction of
      that text stays the same to a millionth of a nat a token

    Args:
        first: the first piece of each new token.
        own: those of them that only ever begin text in the script.
    """

    def __init__(self, first: Sequence[int], own: Sequence[int]) -> None:
        self.first = list(first)
        self.own = list(own)
        self._made: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor) -> Tensor:
        """Return float32 logits (..., V + N), from (..., V)."""
        made = logits.device, logits.shape[-1]
        if made not in self._made:
            sources, added = self.table(logits.shape[-1])
            self._made[made] = sources.to(logits.device), added.to(logits.device)
        sources, added = self._made[made]
        return logits.float()[..., sources] + added

    def table(self, num_old: int) -> tuple[Tensor, Tensor]:
        """Return two tables by token id: the index of the logit to read, among `num_old`, and the
        number to add.
        """
        first_N = torch.tensor(self.first)
        own_N = torch.tensor(self.own, dtype=torch.long)
        sharing_V = torch.bincount(first_N, minlength=num_old).double()
        kept_V = torch.zeros_like(sharing_V)
        kept_V[own_N] = -sharing_V[own_N].log1p()
        given_V = math.log(_SHARE_OF_OTHERS) - sharing_V.log()
        given_V[own_N] = kept_V[own_N]
        sources = torch.cat([torch.arange(num_old), first_N])
        return sources, torch.cat([kept_V, given_V[first_N]]).float()


def base_shares(router: dict[str, Any]) -> PieceShares | None:
    """Return the base's shares of new tokens, from `scale_router` in a plain export's config.json;
    None if it has all tokens.
    """
    new = router.get("new_tokens")
    return None if new is None else PieceShares(new["first"], new["own"])


def logit_cosine(base: Tensor, trained: Tensor) -> Tensor:
    """Return the cosine of two logit vectors (..., V); NaN if either is zero or not finite."""
    base = base.float()
    trained = trained.float()
    norms = torch.linalg.vector_norm(base, dim=-1) * torch.linalg.vector_norm(trained, dim=-1)
    return torch.linalg.vecdot(base, trained) / norms


def cosine_serves_base(cosine: Tensor, threshold: float) -> Tensor:
    """Return True where the paper's rule answers with the base head: cos >= tau, or cos is NaN (a
    broken head).
    """
    return ~(cosine < threshold)


def cosine_log_weights(cosine: Tensor, threshold: float) -> Tensor:
    """Return (K, ...): the log-weights that the paper's rule gives the heads, 0 and -inf."""
    serves_base = cosine_serves_base(cosine, threshold)
    return torch.stack([serves_base, ~serves_base]).double().log()


def chosen_by_cosine(base: Tensor, trained: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the logits (..., V) of the head with which the paper's rule answers, and the
    log-weights (K, ...).
    """
    cosine = logit_cosine(base, trained)
    serves_base = cosine_serves_base(cosine, threshold)
    chosen = torch.where(serves_base.unsqueeze(-1), base.to(trained.dtype), trained)
    return chosen, cosine_log_weights(cosine, threshold)


def rows_at_once(device_type: str, vocab_size: int) -> int:
    """Return the number of tokens whose logits are held at once, in training and outside it."""
    return max(FEWEST_ROWS, LOGITS_AT_ONCE.get(device_type, 2**26) // vocab_size)


def parts_of_positions(ids_BT: Tensor, vocab_size: int) -> Iterator[slice]:
    """Yield the positions in slices so small that their logits can be held at once."""
    num_rows, num_positions = ids_BT.shape
    at_once = max(1, rows_at_once(ids_BT.device.type, vocab_size) // num_rows)
    for start in range(0, num_positions, at_once):
        yield slice(start, min(start + at_once, num_positions))


class RouterMemory(NamedTuple):
    """State of the posterior rule after a token."""

    log_weights_KB: Tensor  # of each head before the next token
    logits_KBV: (
        Tensor  # each head's prediction of the next token, to be judged when that token comes
    )
    sizes_KB: Tensor  # log-sum-exps of those logits

    def chosen(self, indices: Tensor) -> RouterMemory:
        return RouterMemory(*(tensor.index_select(1, indices.to(tensor.device)) for tensor in self))

    def repeated(self, repeats: int) -> RouterMemory:
        return RouterMemory(*(tensor.repeat_interleave(repeats, dim=1) for tensor in self))


def route(
    logits_at: Callable[[slice], Tensor | Sequence[Tensor]],
    ids_BT: Tensor,
    vocab_size: int,
    *,
    base_prior: float | Tensor,
    memory: RouterMemory | None,
    attention_mask: Any,
    evidence_BT: Tensor | None,
    logits_to_keep: int | Tensor,
) -> tuple[Tensor, Tensor, RouterMemory]:
    """Weigh the heads by each token, and mix their predictions of the next one.

    Args:
        logits_at: returns (K, B, positions, V): the heads' logits after the tokens at some
            positions.
        ids_BT: the tokens.
        vocab_size: V.
        base_prior: the base head's weight before the first token of a document, or (B,) of each.
        memory: state after the tokens before these; None if there are none.
        attention_mask: (B, past + T) or None.
        evidence_BT: whether a token counts as evidence; None: all but padding do (`evidence_of`).
        logits_to_keep: return the scores of so many last positions, 0 for all, or of the positions
            in a tensor.

    Returns:
        (B, T, V) scores whose softmax is the mixture; (K, B, T) log-weights after each token; the
        state after the last token.
    """
    if evidence_BT is None:
        evidence_BT = evidence_of(attention_mask, ids_BT.shape[1])
    first = 0
    if isinstance(logits_to_keep, int) and logits_to_keep > 0:
        first = max(0, ids_BT.shape[1] - logits_to_keep)

    prior_K = None
    log_weights = []
    scores = []
    for at in parts_of_positions(ids_BT, vocab_size):
        logits_KBTV = logits_at(at)
        if not isinstance(logits_KBTV, Tensor):
            logits_KBTV = torch.stack([of_head.float() for of_head in logits_KBTV])
        device = logits_KBTV.device
        sizes_KBT = logits_KBTV.logsumexp(dim=-1)
        said_KBT = judged_log_probs(memory, logits_KBTV, sizes_KBT, ids_BT[:, at].to(device))
        if evidence_BT is not None:
            said_KBT = torch.where(evidence_BT[:, at].to(device), said_KBT, 0.0)
        start_KB = None if memory is None else memory.log_weights_KB
        if prior_K is None:
            prior_K = log_prior(base_prior, device)
        log_weights_KBS = posterior_log_weights(said_KBT, prior_K, start_KB)
        log_weights.append(log_weights_KBS[..., 1:])
        if at.stop > first:
            kept = slice(max(0, first - at.start), None)
            scores.append(
                mix_logits(
                    log_weights[-1][..., kept], logits_KBTV[:, :, kept], sizes_KBT[..., kept]
                )
            )
        memory = RouterMemory(log_weights_KBS[..., -1], logits_KBTV[:, :, -1], sizes_KBT[..., -1])
    assert memory is not None, "there is at least one token"
    scores_BTV = torch.cat(scores, dim=1)
    if isinstance(logits_to_keep, Tensor):
        scores_BTV = scores_BTV[:, logits_to_keep]
    return scores_BTV, torch.cat(log_weights, dim=-1), memory


def judged_log_probs(
    memory: RouterMemory | None, logits_KBTV: Tensor, sizes_KBT: Tensor, ids_BT: Tensor
) -> Tensor:
    """Return (K, B, T): each head's log-probability of every token; 0 for a token that no head has
    predicted.
    """
    if memory is None:
        of_first_KB1 = torch.zeros_like(sizes_KBT[..., :1])
    else:
        ids_KB1 = ids_BT[:, :1].expand(len(logits_KBTV), -1, -1)
        of_first_KB1 = memory.logits_KBV.gather(-1, ids_KB1) - memory.sizes_KB.unsqueeze(-1)
    if ids_BT.shape[1] == 1:
        return of_first_KB1
    ids_KBT1 = ids_BT[:, 1:].expand(len(logits_KBTV), -1, -1).unsqueeze(-1)
    of_others = logits_KBTV[:, :, :-1].gather(-1, ids_KBT1).squeeze(-1) - sizes_KBT[..., :-1]
    return torch.cat([of_first_KB1, of_others], dim=-1)


def evidence_of_words(
    judged_BP: Tensor, attention_mask: Any, num_tokens: int, num_positions: int
) -> Tensor:
    """Return (B, T): `evidence_of` the last T of a number of tokens, without the prompt's tokens by
    which the router shall not judge: those not in `judged_BP` (B, prompt).
    """
    judged_BL = F.pad(judged_BP.bool(), (0, num_tokens - judged_BP.shape[1]), value=True)
    judged_BT = judged_BL[:, -num_positions:]
    evidence_BT = evidence_of(attention_mask, num_positions)
    return judged_BT if evidence_BT is None else judged_BT & evidence_BT


def evidence_of(attention_mask: Any, num_positions: int) -> Tensor | None:
    """Return (B, T), False for padding and a token predicted from it; None without a mask.
    ValueError: not 2-D.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask: the router finds padding in a mask of two dimensions, (batch, tokens)"
        )
    seen = attention_mask[:, -num_positions - 1 :].bool()
    if seen.shape[1] == num_positions:
        seen = F.pad(seen, (1, 0))
    return seen[:, 1:] & seen[:, :-1]
