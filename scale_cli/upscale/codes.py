"""What E' starts as: numbers of each token's own, or in part those of the letters that it is spelled with.

Tokens that share letters are often used alike, and most of a vocabulary is rare: what is learned by the rows of
frequent tokens is then read off those of rare ones too. Spelled codes are sums over characters and pairs of them, as
fastText's words are sums over n-grams (Bojanowski et al. 2017, https://arxiv.org/abs/1607.04606); that E' starts as
such is ours.

Shapes: V tokens, E expansion channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Of a spelled code: what is the token's own, beside a sum of variance 1. Source: docs/comparing.md, "Longer".
_OWN = 0.7
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
    codes_VE = _OWN * own_VE + sums_VE / counts_V1.clamp(min=1).sqrt()
    return codes_VE / codes_VE.square().mean(dim=1, keepdim=True).sqrt()


def _grams(text: str) -> list[str]:
    """Return the characters of a token, and the pairs of them, its beginning and its end included."""
    return [*text, *map("".join, pairwise([_BEGINS, *text, _ENDS]))] if text else []
