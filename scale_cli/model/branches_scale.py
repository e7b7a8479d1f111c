"""What one forward pass of a frozen base with its expansions shares, remembers and returns.

Heads are counted from the base's own, head 0; head k belongs to the k-th expansion, which reads x.
Nothing that an expansion computes reaches another head, so all of them keep their bits.

    head 0           H x                        the base, run once
    head k           H x + H'_k u_k, or H x_k + H'_k u_k, if the expansion writes into x (W12) and so has an x of its
                     own

Shapes: B batch, T positions, D base channels, E expansion channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .cache_scale import named
from .expansion_scale import Expansion, LayerContext
from .family_scale import family_of
from .fused_scale import rotation_angles
from .routing import RouterMemory


class ScaleCache(DynamicCache):
    """A DynamicCache with one slot for each stream of each layer, and the router's memory beside
    it.

    With L layers and K expansions, slot i holds the base's heads in layer i, and slot kL + i the
    heads of the k-th expansion in that layer. Slot (K + k)L + i holds the base's heads on the
    stream that the k-th expansion adapts, from its first collaborating layer up; it is used only if
    the untouched stream is served too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router: RouterMemory | None = None

    def reset(self) -> None:
        super().reset()
        self.router = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.router = self.router and self.router.chosen(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.router = self.router and self.router.chosen(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.router = self.router and self.router.repeated(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError: earlier router weights cannot be restored without the tokens
        they came from.
        """
        raise NotImplementedError(
            "a widened model's cache cannot be cropped; generate without assisted decoding or prompt lookup"
        )


@dataclass
class FinalStates:
    """Inputs of the vocabulary heads: the streams after the last norm."""

    expansions: Sequence[Expansion]
    # By the head they belong to: every expansion that writes into x; head 0 if it was asked for or
    # read.
    x_BTD: dict[int, Tensor]
    u_KBTE: list[Tensor]  # of every expansion

    def at(self, positions: slice | Tensor) -> FinalStates:
        """Return the states at some positions, the same for every sequence.

        They are contiguous; otherwise `linear` would make one product per sequence, and read the
        head B times.
        """
        x_BTD = {head: x[:, positions].contiguous() for head, x in self.x_BTD.items()}
        u_KBTE = [u[:, positions].contiguous() for u in self.u_KBTE]
        return FinalStates(self.expansions, x_BTD, u_KBTE)

    def logits(self, vocabulary_head: Any, heads: Sequence[int]) -> list[Tensor]:
        """Return the logits of `heads`; shared products are computed once."""
        products: dict[int, Tensor] = {}  # H x, by the head that x belongs to
        logits = []
        for head in heads:
            owner = head if head in self.x_BTD else 0
            if owner not in products:
                products[owner] = vocabulary_head(self.x_BTD[owner])
            of_head = products[owner]

            if head > 0:
                expansion = self.expansions[head - 1]
                if expansion.new_tokens is not None:
                    weight = expansion.new_tokens.lm_head.weight
                    new = F.linear(self.x_BTD[owner].to(weight.dtype), weight)
                    of_head = torch.cat([of_head, new], dim=-1)
                weight = expansion.lm_head.weight
                of_head = of_head + F.linear(self.u_KBTE[head - 1].to(weight.dtype), weight)
            logits.append(of_head)
        return logits


def base_layer_alone(base_layer: Any, p_BTD: Tensor, context: LayerContext) -> Tensor:
    """Return the untouched stream after a layer; it calls the module because a hook there gathers a
    sharded layer.
    """
    attention = base_layer.self_attn
    family = context.family
    with torch.no_grad():
        return base_layer(
            p_BTD,
            attention_mask=context.attention_masks[family.window_of(attention) is not None],
            position_ids=context.position_ids,
            use_cache=context.cache is not None,
            position_embeddings=context.rotary[family.rotary_kind(attention)][0],
            **named(context.cache),
        )


def layer_context(
    base: Any,
    x_BTD: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: DynamicCache | None,
    *,
    checkpointing: bool,
) -> LayerContext:
    """Return what the layers of one forward pass share; `x_BTD` is x_0.

    Given `position_ids`, transformers searches them for the ends of documents, and so waits for the
    device.
    """
    decoder = base.model
    family = family_of(base.config)
    attentions = [layer.self_attn for layer in decoder.layers]
    masks = {}
    for is_windowed in dict.fromkeys(family.window_of(one) is not None for one in attentions):
        make_mask = create_sliding_window_causal_mask if is_windowed else create_causal_mask
        masks[is_windowed] = make_mask(
            config=decoder.config,
            inputs_embeds=x_BTD,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **named(cache),
        )

    if position_ids is None:
        past = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device) + past
        position_ids = positions.unsqueeze(0)
    rotary = {}
    for kind in dict.fromkeys(family.rotary_kind(one) for one in attentions):
        asked = () if kind is None else (kind,)
        embeddings = decoder.rotary_emb(x_BTD, position_ids, *asked)
        rotary[kind] = (embeddings, rotation_angles(*embeddings))

    return LayerContext(
        family=family,
        position_ids=position_ids,
        rotary=rotary,
        attention_masks=masks,
        cache=cache,
        num_layers=len(attentions),
        checkpointing=checkpointing,
    )
