"""One forward pass of a frozen base for every expansion that stands on it, directly or upon another expansion.

Heads are counted from the bottom: head 0 is the base's own; head k belongs to the k-th expansion, whose parent is a
lower head. An expansion reads the streams of its parent: x alone if the parent is head 0, else x and every u on the way
down. Nothing it computes reaches its parent, so all heads below keep their bits.

    head 0           H x                        the base, run once
    head k           logits of its parent + H'_k u_k; or H x_k + H'_k u_k, if it writes into x (W12) and so has an x
                     of its own

Only an expansion directly on the base may write into x; expansions upon it read the x that it has written.

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
from .expansion_scale import Expansion, LayerContext, LayerReads
from .family_scale import Family, family_of
from .fused_scale import frozen_norm
from .routing import RouterMemory
from .vocabulary_scale import brought_by, embed


class ScaleCache(DynamicCache):
    """A DynamicCache with one slot for each stream of each layer, and the router's memory beside it.

    With L layers and K expansions, slot i holds the base's heads in layer i, and slot kL + i the heads of the k-th
    expansion in that layer. Slot (K + k)L + i holds the base's heads on the stream that the k-th expansion adapts, from
    its first collaborating layer up; it is used only if the untouched stream is served too.
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
        """Raise NotImplementedError: earlier router weights cannot be restored without the tokens they came from."""
        raise NotImplementedError(
            "a widened model's cache cannot be cropped; generate without assisted decoding or prompt lookup"
        )


@dataclass(frozen=True)
class Branch:
    """An expansion, and the head whose streams it reads."""

    expansion: Expansion
    parent: int

    @property
    def writes(self) -> bool:
        """Whether the expansion writes into x in any layer, and so has an x of its own."""
        return self.expansion.first_collaborating_layer < len(self.expansion.layers)


@dataclass
class FinalStates:
    """Inputs of the vocabulary heads: the streams after the last norm."""

    branches: Sequence[Branch]
    # by the head they belong to: every expansion that writes into x; head 0 if it was asked for or read
    x_BTD: dict[int, Tensor]
    u_KBTE: list[Tensor]  # of every expansion

    def at(self, positions: slice | Tensor) -> FinalStates:
        """Return the states at some positions, the same for every sequence.

        They are contiguous; otherwise `linear` would make one product per sequence, and read the head B times.
        """
        x_BTD = {head: x[:, positions].contiguous() for head, x in self.x_BTD.items()}
        return FinalStates(
            self.branches, x_BTD, [u[:, positions].contiguous() for u in self.u_KBTE]
        )

    def path(self, head: int) -> list[int]:
        """Return the heads whose expansions add to a head's logits, bottom up, the head itself last."""
        path: list[int] = []
        while head != 0:
            path.insert(0, head)
            head = self.branches[head - 1].parent
        return path

    def owner(self, head: int) -> int:
        """Return the head that owns the base stream which `head` reads."""
        path = self.path(head)
        return path[0] if path and self.branches[path[0] - 1].writes else 0

    def logits(self, vocabulary_head: Any, heads: Sequence[int]) -> list[Tensor]:
        """Return the logits of `heads`, each after its parent; shared products are computed once."""
        known: dict[int, Tensor] = {}
        for head in heads:
            known[head] = self._logits(vocabulary_head, head, known)
        return [known[head] for head in heads]

    def _logits(self, vocabulary_head: Any, head: int, known: dict[int, Tensor]) -> Tensor:
        if head in known:
            return known[head]
        branch = self.branches[head - 1] if head else None
        if branch is None or branch.writes:
            below: Tensor = vocabulary_head(self.x_BTD[head])
        else:
            below = self._logits(vocabulary_head, branch.parent, known)
        if branch is None:
            return below
        if (new := branch.expansion.new_tokens) is not None:
            below = torch.cat([below, new.logits(self.x_BTD[self.owner(head)])], dim=-1)
        weight = branch.expansion.lm_head.weight
        return below + F.linear(self.u_KBTE[head - 1].to(weight.dtype), weight)


def run_branches(
    base: Any,
    branches: Sequence[Branch],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: ScaleCache | None = None,
    *,
    preserved: bool,
    checkpointing: bool = False,
) -> FinalStates:
    """Run the base's decoder once, with every expansion beside it.

    Args:
        base: the plain model at the bottom.
        branches: at least one, each after its parent.
        input_ids: (B, T).
        attention_mask: (B, past + T) or None.
        position_ids: (B, T), or None: counted from the cache's length.
        cache: extended in place.
        preserved: whether head 0 is wanted. From the layer where no expansion reads the untouched stream any more, it
            costs one more frozen pass of the remaining layers.
        checkpointing: whether backward computes the activations of the trained part again.
    """
    decoder, family = base.model, family_of(base.config)
    x_BTD = embed(
        decoder.embed_tokens, brought_by(branch.expansion for branch in branches), input_ids
    )
    masks = _attention_masks(family, decoder, x_BTD, attention_mask, cache, position_ids)
    if position_ids is None:
        past = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(input_ids.shape[1], device=input_ids.device) + past).unsqueeze(
            0
        )
    kinds = dict.fromkeys(family.rotary_kind(layer.self_attn) for layer in decoder.layers)
    rotary = {kind: family.rotary(decoder, x_BTD, position_ids, kind) for kind in kinds}
    context = LayerContext(
        family, position_ids, rotary, masks, cache, len(decoder.layers), checkpointing
    )
    streams = {0: x_BTD}
    u_KBTE = [branch.expansion.embed_tokens(input_ids) for branch in branches]
    for index, base_layer in enumerate(decoder.layers):
        alone = {}
        first_writing = (
            one.expansion.first_collaborating_layer for one in branches if one.parent == 0
        )
        if preserved and index >= max(first_writing):  # no expansion reads the untouched stream
            alone = {0: _base_layer(base_layer, streams[0], position_ids, context)}
        # The cache's length is read from slot 0: if head 0 is not run, the adapted stream uses that slot.
        streams = alone | _run_layer(
            base_layer, index, branches, streams, u_KBTE, context, apart=preserved
        )
    normed = {head: frozen_norm(decoder.norm, family.norm_form, x) for head, x in streams.items()}
    ends = FinalStates(branches, {head: x for head, (x, _) in normed.items()}, u_KBTE)
    for head, branch in enumerate(branches, start=1):
        _, inverse_rms_BT1 = normed[ends.owner(head)]
        u_KBTE[head - 1] = branch.expansion.norm(inverse_rms_BT1, u_KBTE[head - 1])
    return ends


def _run_layer(
    base_layer: Any,
    index: int,
    branches: Sequence[Branch],
    streams: dict[int, Tensor],
    u_KBTE: list[Tensor],
    context: LayerContext,
    *,
    apart: bool,
) -> dict[int, Tensor]:
    """Run every expansion through one layer, and the base with the first expansion that reads it.

    `streams` maps heads to their base streams before the layer; the base streams after it are returned, and the items
    of `u_KBTE` are replaced. `apart` says that the untouched stream uses the base's own cache slots, so that adapted
    streams need other slots.
    """
    after: dict[int, Tensor] = {}
    reads: dict[int, LayerReads] = {}
    parents = [branch.parent for branch in branches]
    for head, branch in enumerate(branches, start=1):
        added: Any = branch.expansion.layers[index]
        own_slot, u_BTE = context.slot(head, index), u_KBTE[head - 1]
        if index >= branch.expansion.first_collaborating_layer:
            x_BTD = streams[head] if head in streams else streams[0]
            slot = context.slot(len(branches) + head if apart else 0, index)
            after[head], u_KBTE[head - 1], below, own = added(
                base_layer, x_BTD, u_BTE, context, slot, own_slot
            )
        elif branch.parent in reads:
            below = reads[branch.parent]
            u_KBTE[head - 1], own = added.read_on(base_layer, below, u_BTE, context, own_slot)
        else:  # the first expansion that reads the base computes it
            slot = context.slot(0, index)
            after[0], u_KBTE[head - 1], below, own = added(
                base_layer, streams[0], u_BTE, context, slot, own_slot
            )
            reads[0] = below
        if head in parents:
            reads[head] = below.joined(own)
    return after


def _base_layer(
    base_layer: Any, p_BTD: Tensor, position_ids: Tensor, context: LayerContext
) -> Tensor:
    """Return the untouched stream after a layer; it calls the module because a hook there gathers a sharded layer."""
    attention, family = base_layer.self_attn, context.family
    with torch.no_grad():
        return base_layer(
            p_BTD,
            attention_mask=context.attention_masks[family.window_of(attention) is not None],
            position_ids=position_ids,
            use_cache=context.cache is not None,
            position_embeddings=context.rotary[family.rotary_kind(attention)],
            **named(context.cache),
        )


def _attention_masks(
    family: Family,
    decoder: Any,
    x_BTD: Tensor,
    attention_mask: Tensor | None,
    cache: DynamicCache | None,
    position_ids: Tensor | None,
) -> dict[bool, Any]:
    """Return the mask of the layers with full attention (False), and of those with a window (True).

    Given `position_ids`, transformers searches them for the ends of documents, and so waits for the device.
    """
    windowed = (family.window_of(layer.self_attn) is not None for layer in decoder.layers)
    return {
        kind: (create_sliding_window_causal_mask if kind else create_causal_mask)(
            config=decoder.config,
            inputs_embeds=x_BTD,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **named(cache),
        )
        for kind in dict.fromkeys(windowed)
    }
