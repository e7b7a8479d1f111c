"""What two heads said of a text that came, one number a token, without the logits of all positions at once.

Shapes: K heads (base, trained), B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        cosine_BT: cosine of the two heads' logit vectors.
    """

    log_probs_KBT: Tensor
    cosine_BT: Tensor


# (B, positions, V) logits of the base head and of the trained one at some positions of one forward pass.
HeadLogits = Callable[[slice], tuple[Tensor, Tensor]]


class TwoHeaded(Protocol):
    """A model whose base head and trained head are observed together."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its parameters: they tell its device."""

    def head_logits(self, input_ids: Tensor) -> HeadLogits:
        """Run the decoder over `input_ids` (B, T) and return what gives both heads' logits at any positions."""

    def observe_tokens(self, input_ids: Tensor, next_ids_BT: Tensor) -> Observation:
        """Return what both heads said of the tokens that came."""


def observe_logits(logits_at: HeadLogits, next_ids_BT: Tensor, vocab_size: int) -> Observation:
    """Judge both heads by the tokens that came.

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
        base, trained = (logits.float() for logits in logits_at(chunk))
        next_ids = next_ids_BT[:, chunk]
        said = torch.stack([observed_log_probs(base, next_ids), observed_log_probs(trained, next_ids)])
        observations.append(Observation(said, logit_cosine(base, trained)))
    return Observation(
        torch.cat([o.log_probs_KBT for o in observations], dim=-1),
        torch.cat([o.cosine_BT for o in observations], dim=-1),
    )
