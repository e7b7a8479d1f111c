"""What E' starts as, other than numbers of each token's own: in part what follows it in a text, and its letters.

Most of a vocabulary is rare. Where tokens that are used alike start alike, what is learned by the rows of frequent ones
is read off those of rare ones too.

Spelled codes are sums over characters and pairs of them, as fastText's words are sums over n-grams (Bojanowski et al.
2017, https://arxiv.org/abs/1607.04606): tokens that share letters are often used alike.

Codes by cooccurrence are the nearer the more alike what stands after two tokens in a text: leading singular directions
of their positive pointwise mutual information with the tokens that follow, contexts smoothed, scaled by the root of the
values (Levy, Goldberg and Dagan 2015, https://aclanthology.org/Q15-1016). That E' starts as either is ours.

Shapes: V tokens, E expansion channels, N tokens of text, C = 2 V: one token after it or two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

# Makes (V, E) codes, rows of rms 1, of E and of what draws.
DrawCodes = Callable[[int, torch.Generator], Tensor]

# Of a spelled code: what is the token's own, beside a sum of variance 1; of a code by cooccurrence: what is spelled,
# beside directions of variance 1. Source: ours (docs/results/longer-runs.md).
_OWN, _SPELLED = 0.7, 0.7
# Which tokens after a token count, and how much.
_FOLLOWING = {1: 1.0, 2: 0.5}
# The counts of contexts, to this power: those of rare ones are kept from being large by accident (Levy et al., 3.2).
_SMOOTHED = 0.75
# Directions beyond those that are kept, and iterations, of the randomised decomposition (Halko et al. 2011, 4.5).
_BEYOND, _ITERATIONS = 16, 4
# A row smaller than this is rounding.
_NOTHING = 1e-4
_BEGINS, _ENDS, _NO_CHARACTER = "\x02", "\x03", "\ufffd"


def texts_of_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Return what every id of a model decodes to by itself; nothing where it is a part of a character, or no token."""
    named = min(len(tokenizer), vocab_size)
    texts = tokenizer.batch_decode([[token] for token in range(named)], clean_up_tokenization_spaces=False)
    return [*("" if _NO_CHARACTER in text else text for text in texts), *[""] * (vocab_size - named)]


def spelled_codes(texts: Sequence[str], width: int, generator: torch.Generator) -> Tensor:
    """Return (V, E) codes, rows of rms 1, that are the nearer the more characters and pairs two tokens share."""
    grams = [_grams(text) for text in texts]
    numbers: dict[str, int] = {}
    index = torch.tensor([numbers.setdefault(gram, len(numbers)) for of_one in grams for gram in of_one]).long()
    counts_V1 = torch.tensor([[len(of_one)] for of_one in grams])
    own_VE = torch.randn(len(texts), width, generator=generator)
    of_grams = torch.randn(max(len(numbers), 1), width, generator=generator)
    sums_VE = F.embedding_bag(index, of_grams, (counts_V1.cumsum(0) - counts_V1)[:, 0], mode="sum")
    # A token without letters has numbers of its own alone.
    return _of_rms_1(_OWN * own_VE + sums_VE / counts_V1.clamp(min=1).sqrt())


def cooccurrence_codes(texts: Sequence[str], ids_N: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return (V, E) codes, rows of rms 1, that are the nearer the more alike what stands after two tokens.

    A token that the text does not have keeps its spelled code. Neighbours count across documents too.
    """
    spelled_VE = spelled_codes(texts, width, generator)
    information_VC = torch.cat(
        [weight * _information(ids_N, distance, len(texts)) for distance, weight in _FOLLOWING.items()], dim=1
    )
    directions_VE = _directions(information_VC, width, generator)
    # Turned at random: no channel of u is to hold more than another.
    turned_VE = directions_VE @ nn.init.orthogonal_(torch.empty(width, width), generator=generator)
    return _of_rms_1(_SPELLED * spelled_VE + _of_rms_1(turned_VE))


def _information(ids_N: Tensor, distance: int, vocab_size: int) -> Tensor:
    """Return sparse (V, V): log p(follower | token) / q(follower) where that is positive, q being smoothed counts."""
    ids_N = ids_N.long()  # V squared is beyond 32 bits
    pairs, counts = torch.unique(ids_N[:-distance] * vocab_size + ids_N[distance:], return_counts=True)
    tokens, followers = pairs // vocab_size, pairs % vocab_size
    counts_V = torch.bincount(ids_N, minlength=vocab_size).double()
    smoothed_V = counts_V.pow(_SMOOTHED) / counts_V.pow(_SMOOTHED).sum()
    information = (counts / (counts_V[tokens] * smoothed_V[followers])).log().clamp(min=0.0).float()
    places = torch.stack([tokens, followers])
    return torch.sparse_coo_tensor(places, information, (vocab_size, vocab_size), check_invariants=True).coalesce()


def _directions(information_VC: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return (V, E): the leading left singular directions, by the root of their values; 0 where there are no more."""
    rank = min(width, len(information_VC))
    drawn = min(rank + _BEYOND, len(information_VC))
    # The decomposition draws from the process's own numbers. By compressed rows it is three times as fast; torch warns
    # that those are in beta.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.default_generator.manual_seed(generator.initial_seed())
        left, values, _ = torch.svd_lowrank(information_VC.to_sparse_csr(), q=drawn, niter=_ITERATIONS)
    # Signs are fixed (the largest entry of each is positive): they hang on the number of threads.
    largest = left.gather(0, left.abs().argmax(dim=0, keepdim=True))
    left = left * torch.where(largest < 0, -1.0, 1.0)
    return F.pad((left * values.sqrt())[:, :rank], (0, width - rank))


def _of_rms_1(rows: Tensor) -> Tensor:
    """Return rows of rms 1; a row of nothing stays one."""
    rms = rows.square().mean(dim=1, keepdim=True).sqrt()
    return torch.where(rms > _NOTHING, rows / rms, 0.0)


def _grams(text: str) -> list[str]:
    """Return the characters of a token, and the pairs of them, its beginning and its end included."""
    return [*text, *map("".join, pairwise([_BEGINS, *text, _ENDS]))] if text else []


# What makes (V, E) codes of the texts of tokens, ids of a text, E and a generator; None: numbers of each token's own.
CODES: dict[str, Callable[[Sequence[str], Tensor, int, torch.Generator], Tensor] | None] = {
    "random": None,
    "cooccurrence": cooccurrence_codes,
}
