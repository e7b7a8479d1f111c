"""What a base knows of a text, by what the text's tokens cost it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from scale_cli.methods.starts.start import TextToLearn


@dataclass(frozen=True)
class Knowledge:
    """Nats a token of a text: what the base needs, and what the frequencies of its tokens do."""

    by_base: float
    by_frequencies: float

    @property
    def is_some(self) -> bool:
        return self.by_base < self.by_frequencies


@torch.no_grad()
def measure_knowledge(base: Any, text: TextToLearn) -> Knowledge:
    """Return what a text without new tokens costs a base."""
    ids = text.sample_ids.to(base.device)
    logits = base(ids, use_cache=False).logits[0, :-1].float()
    return Knowledge(
        by_base=torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item(),
        by_frequencies=torch.special.entr(text.token_shares).sum().item(),
    )


def knows(base: Any, text: TextToLearn) -> bool:
    """Return whether a base predicts a text better than the frequencies of its tokens do.

    Text with new tokens counts as unknown: the base has no row for them.
    """
    has_new = bool(text.sample_ids.max() >= base.config.vocab_size)
    return not has_new and measure_knowledge(base, text).is_some
