"""What several heads said of a text that came, one number a token, without the logits of all positions at once.

Shapes: K heads (the first the base's, the last the trained one's), B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .routing import logit_cosine, observed_log_probs

# Logits of each head held at once: 16 MB in float32.
_LOGITS_AT_ONCE = 2**22


@dataclass
class Observation:
    """What the heads said of tokens that came, and how alike their predictions were.

    Args:
        log_probs_KBT: log-probability each head gave the token that came, float32, nats.
        cosine_BT: cosine of the logit vectors of the first and the last head.
    """

    log_probs_KBT: Tensor
    cosine_BT: Tensor


# (B, positions, V) logits of every head at some positions of one forward pass.
HeadLogits = Callable[[slice], Sequence[Tensor]]


class Observable(Protocol):
    """A model whose heads are observed together."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its parameters: they tell its device."""

    def observe_tokens(self, input_ids: Tensor, next_ids_BT: Tensor) -> Observation:
        """Return what the heads said of the tokens that came."""


class TwoHeaded(Observable, Protocol):
    """A model whose base head and trained head are observed together."""

    def head_logits(self, input_ids: Tensor) -> HeadLogits:
        """Run the decoder over `input_ids` (B, T) and return what gives both heads' logits at any positions."""


def observe_logits(logits_at: HeadLogits, next_ids_BT: Tensor, vocab_size: int) -> Observation:
    """Judge the heads by the tokens that came.

    Args:
        logits_at: of T positions, or of more that come after them.
        next_ids_BT: the token after each position.
        vocab_size: V.
    """
    observations = []
    num_positions = max(1, _LOGITS_AT_ONCE // (len(next_ids_BT) * vocab_size))
    num_observed = next_ids_BT.shape[1]
    for start in range(0, num_observed, num_positions):
        chunk = slice(start, min(start + num_positions, num_observed))
        heads = [logits.float() for logits in logits_at(chunk)]
        said = torch.stack([observed_log_probs(logits, next_ids_BT[:, chunk]) for logits in heads])
        observations.append(Observation(said, logit_cosine(heads[0], heads[-1])))
    return Observation(
        torch.cat([o.log_probs_KBT for o in observations], dim=-1),
        torch.cat([o.cosine_BT for o in observations], dim=-1),
    )
