"""A trained model served beside the untouched base: two models, two forwards, one routing rule.

This is what any method can be given without widening anything, and what SCALE-Route has to be weighed against.

Shapes: B batch, T positions, V vocabulary, K heads (base, trained).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .observing import HeadLogits, Observation, observe_logits


class BaseAndTrained(nn.Module):
    """Two causal language models of one vocabulary, observed together as the two heads of a widened model are."""

    def __init__(self, base: Any, trained: Any) -> None:
        super().__init__()
        self.base = base
        self.trained = trained

    def head_logits(self, input_ids: Tensor) -> HeadLogits:
        """Run both models over `input_ids` (B, T) and return what gives their logits at any positions."""
        models = (self.base, self.trained)
        hidden = [model.get_decoder()(input_ids, use_cache=False).last_hidden_state for model in models]
        heads = [model.get_output_embeddings() for model in models]

        def logits_at(positions: slice) -> tuple[Tensor, Tensor]:
            base, trained = (head(states[:, positions]) for head, states in zip(heads, hidden, strict=True))
            return base, trained

        return logits_at

    def observe_tokens(self, input_ids: Tensor, next_ids_BT: Tensor) -> Observation:
        """Return what both models said of the tokens that came after each of `input_ids` (B, T)."""
        return observe_logits(self.head_logits(input_ids), next_ids_BT, self.base.config.vocab_size)
