"""The operations that the mathematics asks for, product by product.

A linear map W of `in` x `out` channels costs 2 in out a token wherever it is applied: forward, for the gradient of what
it reads, and for its own gradient. Widened by r in both directions (in units of W, per token):

| product | forward | gradient of what is read          | gradient of the weight |
|---------|---------|-----------------------------------|------------------------|
| W       | 1       | 1 where x needs a gradient        | 1 where W trains       |
| W21     | r       | r where x needs a gradient        | r                      |
| W22     | r^2     | r^2                               | r^2                    |
| W12     | r       | r                                 | r                      |

which is 1 + 2r + 3r^2 where nothing writes into x (Preserve), and 2 + 6r + 3r^2 where x needs a gradient and W12 exists
(Adapt). Included by the same rule: the vocabulary head (H as a W, H' as its W21 reading u), and attention as torch's
counter has it: scores and values over the whole square, 2 products forward and 5 backward, for base heads only where
their stream needs a gradient. x needs a gradient above the first W12; the three projections that read the lowest
collaborating layer's input do not. Not included, here or in the count: norms, rotations, activations, the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scale_cli.benchmark.shapes import Shape
from scale_cli.model.configuration_scale import ScaleConfig


@dataclass(frozen=True)
class _Map:
    """One linear map of the base and what widens it, in channels."""

    base_in: int
    base_out: int
    added_in: int
    added_out: int

    def products(self, *, x_wanted: bool, collaborates: bool) -> int:
        """Return multiply-adds a token: the rows of the table above."""
        base, read = self.base_in * self.base_out, self.base_in * self.added_out
        inner, write = self.added_in * self.added_out, self.added_in * self.base_out
        total = base + 2 * read + 3 * inner
        if x_wanted:
            total += base + read
        if collaborates:
            total += 3 * write
        return total


def ideal_flops(shape: Shape, config: ScaleConfig) -> int:
    """Return the operations of one training step of a widened model, forward and backward."""
    base: Any = config.base()
    head_dim = base.hidden_size // base.num_attention_heads
    hidden = (base.hidden_size, config.expansion_hidden_size)
    channels = (base.intermediate_size, config.expansion_intermediate_size)
    heads = (base.num_attention_heads, config.expansion_num_attention_heads)
    queries = (heads[0] * head_dim, heads[1] * head_dim)
    keys = (base.num_key_value_heads * head_dim, config.expansion_num_key_value_heads * head_dim)
    products, attentions = 0, 0
    x_wanted = False
    for layer in range(base.num_hidden_layers):
        in_attention = layer in config.attention_collaboration_layers
        in_mlp = layer in config.mlp_collaboration_layers
        for read, written in ((hidden, queries), (hidden, keys), (hidden, keys)):
            products += _map(read, written).products(x_wanted=x_wanted, collaborates=in_attention)
        # q, k, v (or gate, up) that collaborate have written into what o (or down) reads.
        x_wanted = x_wanted or in_attention
        attentions += heads[0] * (7 if x_wanted else 2) + heads[1] * 7
        products += _map(queries, hidden).products(x_wanted=x_wanted, collaborates=in_attention)
        for _ in ("gate", "up"):
            products += _map(hidden, channels).products(x_wanted=x_wanted, collaborates=in_mlp)
        x_wanted = x_wanted or in_mlp
        products += _map(channels, hidden).products(x_wanted=x_wanted, collaborates=in_mlp)
    vocabulary = base.vocab_size
    products += (2 if x_wanted else 1) * hidden[0] * vocabulary + 3 * hidden[1] * vocabulary
    return 2 * shape.num_tokens * (products + attentions * shape.sequence_length * head_dim)


def _map(read: tuple[int, int], written: tuple[int, int]) -> _Map:
    return _Map(read[0], written[0], read[1], written[1])
