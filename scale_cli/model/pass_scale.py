"""What one forward pass of a frozen base with its expansion shares, remembers and returns.

    base head        H x                 where nothing writes into x, or H x_p, of the untouched stream
    trained head     H x_a + H' u        x_a is x, into which the expansion may write (W12)

Nothing that the expansion computes reaches the base's head, so it keeps its bits.

Shapes: B batch, T positions, D base channels, E expansion channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .cache_scale import CACHE
from .expansion_scale import LayerContext
from .family_scale import family_of
from .fused_scale import rotation_angles
from .routing import RouterMemory


class ScaleCache(DynamicCache):
    """What a decoding step leaves to the next one of both streams: their keys and values, and the
    router's memory.

    What runs the streams says which layer of the cache is whose: `LayerContext.slot` of a widened
    model, `ModelPair` of two models.
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

    x_BTD: Tensor  # what the trained head reads of the base
    u_BTE: Tensor  # of the expansion
    # The untouched stream; None where it is x, or was not asked for.
    p_BTD: Tensor | None

    def at(self, positions: slice | Tensor) -> FinalStates:
        """Return the states at some positions, the same for every sequence.

        They are contiguous; otherwise `linear` would make one product per sequence, and read the
        head B times.
        """
        x_BTD, u_BTE = (of[:, positions].contiguous() for of in (self.x_BTD, self.u_BTE))
        p_BTD = None if self.p_BTD is None else self.p_BTD[:, positions].contiguous()
        return FinalStates(x_BTD, u_BTE, p_BTD)


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
            **{CACHE: context.cache},
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
            **{CACHE: cache},
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
