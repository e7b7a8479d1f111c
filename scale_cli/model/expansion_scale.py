"""The blocks added to a frozen decoder: widened linear maps, norms, heads and MLP channels, layer by layer.

Every linear map W of the decoder is widened in both directions; W itself is never touched:

    [ y  ]   [ W    W12 ] [ x ]        x : base stream,      D channels
    [ y' ] = [ W21  W22 ] [ u ]        u : expansion stream, E channels

An expansion may stand upon other expansions: W21 then reads x and their streams, concatenated.

Shapes: B batch, T positions, D base channels, E expansion channels, N attention heads, A channels a head.
A tensor that may have several shapes carries no suffix.

Source: SCALE, arXiv 2511.03270; normalising both streams by the base stream's RMS is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_scale import ScaleConfig
from .family_scale import OWNERS, READ_BY_ATTENTION, READ_BY_MLP, Family, family_of
from .fused_scale import (
    NormForm,
    add_product,
    frozen_norm,
    lower_weights,
    product_dtype,
    rotation_angles,
)
from .vocabulary_scale import NewTokens

Weights = dict[
    Tensor, Tensor
]  # from a parameter to its copy in the dtype of the products (`lower_weights`)


class ExpansionLinear(nn.Module):
    """The blocks that widen one frozen linear map: W21 and W22, and W12 if the expansion collaborates here.

    If nothing is to be written into the base stream, W12 is absent, not zero: no parameter, no product, and a
    non-finite u cannot reach x. `below` are the linear maps that widen W already, bottom up; W21 reads the base's
    channels and then theirs.
    """

    weight_22: nn.Parameter

    def __init__(
        self,
        base_linear: nn.Linear,
        below: Sequence[ExpansionLinear],
        in_features: int,
        out_features: int,
        *,
        collaborates: bool,
    ) -> None:
        super().__init__()
        read_features = base_linear.in_features + sum(linear.weight_22.shape[1] for linear in below)
        self.weight_21 = nn.Parameter(torch.empty(out_features, read_features))
        self.weight_22 = nn.Parameter(torch.empty(out_features, in_features))
        self.weight_12 = (
            nn.Parameter(torch.empty(base_linear.out_features, in_features))
            if collaborates
            else None
        )
        self.bias_2 = None if base_linear.bias is None else nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y' = W21 x + W22 u, as two products so that no gradient is computed for a frozen x."""
        weight_21, bias_2 = (
            weights[self.weight_21],
            None if self.bias_2 is None else weights[self.bias_2],
        )
        read = F.linear(x.flatten(0, -2).to(weight_21.dtype), weight_21, bias_2)
        return add_product(read, u.flatten(0, -2), weights[self.weight_22]).unflatten(
            0, x.shape[:-1]
        )

    def collaborate(self, y: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y + W12 u, where y = W x may be overwritten; without W12, return y."""
        if self.weight_12 is None:
            return y
        return add_product(y.flatten(0, -2), u.flatten(0, -2), weights[self.weight_12]).unflatten(
            0, y.shape[:-1]
        )


class ExpansionNorm(nn.Module):
    """Norm of the expansion stream: its own gains, but the base stream's RMS: u^ = g' u / rms(x).

    x^ stays untouched, so preservation is exact, and the widened model is exactly a plain Llama (docs/serving.md).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, inverse_rms_BT1: Tensor, u_BTE: Tensor) -> Tensor:
        """Return u^ (B, T, E), computed in float32 and cast to the dtype of the products that read it."""
        return (self.weight * (u_BTE.float() * inverse_rms_BT1)).to(product_dtype(u_BTE))


@dataclass
class LayerContext:
    """Values that all layers of one forward pass share."""

    family: Family
    position_ids: Tensor
    rotary: dict[str | None, tuple[Tensor, Tensor]]  # cosines and sines by `Family.rotary_kind`
    # keyed by whether the layer has a window; a Tensor, BlockMask or None, as transformers' attention functions take it
    attention_masks: dict[bool, Any]
    cache: DynamicCache | None
    num_layers: int
    checkpointing: bool = (
        False  # whether backward computes the activations of the trained part again
    )
    angles: dict[str | None, tuple[Tensor, Tensor]] = field(
        init=False
    )  # an argument of `rotate`, by the same kinds

    def __post_init__(self) -> None:
        self.angles = {
            kind: rotation_angles(*embeddings) for kind, embeddings in self.rotary.items()
        }

    def slot(self, stream: int, layer_index: int) -> int:
        """Return the cache slot of one stream's heads in one layer; stream 0 is the base."""
        return stream * self.num_layers + layer_index

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of a layer; with checkpointing, keep only its inputs for backward."""
        if not self.checkpointing:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def attend(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, slot: int
) -> Tensor:
    """Return causal attention over heads of the base's head_dim: (B, T, N A) from projections of that shape.

    `attention` is the base's module; transformers' attention functions read head ratio and scale from it. Both are the
    same for added heads, and so are the gains of a norm over each head's channels, if the family has one. Window and
    positions are passed beside the mask: flash attention reads them, and finds in the positions where documents begin.
    """
    family = context.family
    window = family.window_of(attention)
    shape = (*q.shape[:-1], -1, attention.head_dim)
    q_BTNA, k_BTNA, v_BTNA = (states.view(shape) for states in (q, k, v))
    if family.head_norms is not None:
        q_norm, k_norm = family.head_norms
        q_BTNA, k_BTNA = getattr(attention, q_norm)(q_BTNA), getattr(attention, k_norm)(k_BTNA)
    if family.is_rotated(attention):
        kind = family.rotary_kind(attention)
        q_BNTA, k_BNTA = family.rotate(q_BTNA, k_BTNA, context.rotary[kind], context.angles[kind])
    else:
        q_BNTA, k_BNTA = q_BTNA.transpose(1, 2), k_BTNA.transpose(1, 2)
    v_BNTA = v_BTNA.transpose(1, 2)
    if context.cache is not None:
        k_BNTA, v_BNTA = context.cache.update(k_BNTA, v_BNTA, slot)
    implementation = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    attended, _ = function(
        attention,
        q_BNTA,
        k_BNTA,
        v_BNTA,
        context.attention_masks[window is not None],
        dropout=0.0,
        scaling=attention.scaling,
        sliding_window=window,
        position_ids=context.position_ids,
    )
    return attended.reshape(*shape[:-2], -1).contiguous()


InverseRms = dict[str, Tensor]  # by the name of a norm of the base: 1 / rms of its input, (B, T, 1)


@dataclass
class LayerReads:
    """Inputs that the blocks added to a layer read from the streams below them."""

    attention_BTD: Tensor  # input of q, k, v
    heads: Tensor  # (B, T, N A), input of o
    mlp_BTD: Tensor  # input of gate and up
    channels: Tensor  # (B, T, MLP channels), input of down
    inverse_rms: InverseRms  # of the base stream alone

    def joined(self, above: LayerReads) -> LayerReads:
        """Return the inputs of an expansion that stands upon these streams and upon `above`."""
        return LayerReads(
            torch.cat([self.attention_BTD, above.attention_BTD], dim=-1),
            torch.cat([self.heads, above.heads], dim=-1),
            torch.cat([self.mlp_BTD, above.mlp_BTD], dim=-1),
            torch.cat([self.channels, above.channels], dim=-1),
            self.inverse_rms,
        )


def _norm(
    form: NormForm, inverse_rms: InverseRms, owner: Any, name: str | None, x: Tensor
) -> Tensor:
    """Return x^ by one of the base's norms and record 1 / rms(x) in `inverse_rms`; without a norm, return x."""
    if name is None:
        return x
    normed, inverse_rms[name] = frozen_norm(getattr(owner, name), form, x)
    return normed


def read_base(
    base_layer: Any, x_BTD: Tensor, context: LayerContext, slot: int
) -> tuple[Tensor, LayerReads]:
    """Return the base stream after one of its own layers, and the inputs of the blocks added to that layer."""
    attention, mlp, family = base_layer.self_attn, base_layer.mlp, context.family
    inverse_rms: InverseRms = {}
    norm = partial(_norm, family.norm_form, inverse_rms)
    x = norm(base_layer, family.before_attention, x_BTD)
    q, k, v = family.queries_keys_values(attention, x)
    q, k = (
        norm(attention, name, read) for name, read in zip(family.width_norms, (q, k), strict=True)
    )
    heads = attend(attention, q, k, v, context, slot)
    x_BTD = x_BTD + norm(base_layer, family.after_attention, attention.o_proj(heads))
    y = norm(base_layer, family.before_mlp, x_BTD)
    if not family.has_mlp(attention.config, attention.layer_idx):
        nothing = y[..., :0]
        return x_BTD + norm(base_layer, family.after_mlp, mlp(y)), LayerReads(
            x, heads, nothing, nothing, inverse_rms
        )
    channels = family.channels(mlp, *family.gate_up(mlp, y))
    x_BTD = x_BTD + norm(base_layer, family.after_mlp, mlp.down_proj(channels))
    return x_BTD, LayerReads(x, heads, y, channels, inverse_rms)


class ExpansionLayer(nn.Module):
    """Everything added to one decoder layer: heads, MLP channels, gains, and the blocks between the two streams.

    Its maps have the names in `OWNERS`; its norms have the names of the base's norms.
    """

    q_proj: ExpansionLinear
    k_proj: ExpansionLinear
    v_proj: ExpansionLinear
    o_proj: ExpansionLinear
    gate_proj: ExpansionLinear
    up_proj: ExpansionLinear
    down_proj: ExpansionLinear

    def __init__(
        self,
        family: Family,
        base_layer: Any,
        below: Sequence[ExpansionLayer],
        config: ScaleConfig,
        layer_index: int,
    ) -> None:
        super().__init__()
        head_dim = base_layer.self_attn.head_dim
        hidden_size, intermediate_size = (
            config.expansion_hidden_size,
            config.expansion_intermediate_size,
        )
        query_size = config.expansion_num_attention_heads * head_dim
        key_value_size = config.expansion_num_key_value_heads * head_dim
        in_attention = layer_index in config.attention_collaboration_layers
        in_mlp = layer_index in config.mlp_collaboration_layers

        def add_linear(name: str, in_features: int, out_features: int) -> None:
            frozen, linears = (
                family.linear(base_layer, name),
                [getattr(layer, name) for layer in below],
            )
            collaborates = in_attention if OWNERS[name] == "self_attn" else in_mlp
            widened = ExpansionLinear(
                frozen, linears, in_features, out_features, collaborates=collaborates
            )
            setattr(self, name, widened)

        def add_norms(*sizes: tuple[str | None, int]) -> None:
            for name, size in sizes:
                if name is not None:
                    setattr(self, name, ExpansionNorm(size))

        self.layer_index = layer_index
        self.has_mlp = family.has_mlp(base_layer.self_attn.config, layer_index)
        self.collaborates = in_attention or in_mlp
        q_norm, k_norm = family.width_norms
        add_norms(
            (family.before_attention, hidden_size), (q_norm, query_size), (k_norm, key_value_size)
        )
        add_linear("q_proj", hidden_size, query_size)
        add_linear("k_proj", hidden_size, key_value_size)
        add_linear("v_proj", hidden_size, key_value_size)
        add_linear("o_proj", query_size, hidden_size)
        add_norms((family.after_attention, hidden_size))
        if not self.has_mlp:
            return
        add_norms((family.before_mlp, hidden_size))
        add_linear("gate_proj", hidden_size, intermediate_size)
        add_linear("up_proj", hidden_size, intermediate_size)
        add_linear("down_proj", intermediate_size, hidden_size)
        add_norms((family.after_mlp, hidden_size))

    def forward(
        self,
        base_layer: Any,
        x_BTD: Tensor,
        u_BTE: Tensor,
        context: LayerContext,
        base_slot: int,
        own_slot: int,
    ) -> tuple[Tensor, Tensor, LayerReads, LayerReads]:
        """Return x and u after this layer, and the inputs for blocks above: those it read, and those its stream gives.

        While nothing has written into x (below every collaborating layer; always in Preserve), the base layer runs
        alone and without autograd: it costs one forward pass, and is never computed twice.
        """
        if self.collaborates or x_BTD.requires_grad:
            return context.run(self._both, base_layer, x_BTD, u_BTE, context, base_slot, own_slot)
        with torch.no_grad():
            x_BTD, read = read_base(base_layer, x_BTD, context, base_slot)
        u_BTE, own = self.read_on(base_layer, read, u_BTE, context, own_slot)
        return x_BTD, u_BTE, read, own

    def read_on(
        self, base_layer: Any, read: LayerReads, u_BTE: Tensor, context: LayerContext, own_slot: int
    ) -> tuple[Tensor, LayerReads]:
        """Return u after this layer, and the inputs its stream gives to blocks above, from inputs computed already."""
        return context.run(self._added, base_layer, read, u_BTE, context, own_slot)

    def _added(
        self, base_layer: Any, read: LayerReads, u_BTE: Tensor, context: LayerContext, own_slot: int
    ) -> tuple[Tensor, LayerReads]:
        weights, family, inverse_rms = self._weights(), context.family, read.inverse_rms
        u = self._norm(family.before_attention, inverse_rms, u_BTE)
        heads = self._heads(
            base_layer.self_attn, read.attention_BTD, u, inverse_rms, weights, context, own_slot
        )
        u_BTE = u_BTE + self._norm(
            family.after_attention, inverse_rms, self.o_proj(read.heads, heads, weights)
        )
        if not self.has_mlp:
            return u_BTE, LayerReads(u, heads, read.mlp_BTD, read.channels, inverse_rms)
        y = self._norm(family.before_mlp, inverse_rms, u_BTE)
        channels = self._channels(base_layer.mlp, read.mlp_BTD, y, weights, family)
        u_BTE = u_BTE + self._norm(
            family.after_mlp, inverse_rms, self.down_proj(read.channels, channels, weights)
        )
        return u_BTE, LayerReads(u, heads, y, channels, inverse_rms)

    def _both(
        self,
        base_layer: Any,
        x_BTD: Tensor,
        u_BTE: Tensor,
        context: LayerContext,
        base_slot: int,
        own_slot: int,
    ) -> tuple[Tensor, Tensor, LayerReads, LayerReads]:
        attention, mlp, weights, family = (
            base_layer.self_attn,
            base_layer.mlp,
            self._weights(),
            context.family,
        )
        inverse_rms: InverseRms = {}
        norm = partial(_norm, family.norm_form, inverse_rms)

        def add(names: Sequence[str], products: Sequence[Tensor], u: Tensor) -> list[Tensor]:
            return [
                getattr(self, name).collaborate(y, u, weights)
                for name, y in zip(names, products, strict=True)
            ]

        x = norm(base_layer, family.before_attention, x_BTD)
        u = self._norm(family.before_attention, inverse_rms, u_BTE)
        q, k, v = add(READ_BY_ATTENTION, family.queries_keys_values(attention, x), u)
        q, k = (
            norm(attention, name, read)
            for name, read in zip(family.width_norms, (q, k), strict=True)
        )
        base_heads = attend(attention, q, k, v, context, base_slot)
        added_heads = self._heads(attention, x, u, inverse_rms, weights, context, own_slot)
        written = self.o_proj.collaborate(attention.o_proj(base_heads), added_heads, weights)
        x_BTD = x_BTD + norm(base_layer, family.after_attention, written)
        added = self.o_proj(base_heads, added_heads, weights)
        u_BTE = u_BTE + self._norm(family.after_attention, inverse_rms, added)
        y = norm(base_layer, family.before_mlp, x_BTD)
        if not self.has_mlp:
            read, own = (
                LayerReads(*reads, y[..., :0], y[..., :0], inverse_rms)
                for reads in ((x, base_heads), (u, added_heads))
            )
            return x_BTD + norm(base_layer, family.after_mlp, mlp(y)), u_BTE, read, own
        z = self._norm(family.before_mlp, inverse_rms, u_BTE)
        base_channels = family.channels(mlp, *add(READ_BY_MLP, family.gate_up(mlp, y), z))
        added_channels = self._channels(mlp, y, z, weights, family)
        written = self.down_proj.collaborate(mlp.down_proj(base_channels), added_channels, weights)
        x_BTD = x_BTD + norm(base_layer, family.after_mlp, written)
        added = self.down_proj(base_channels, added_channels, weights)
        u_BTE = u_BTE + self._norm(family.after_mlp, inverse_rms, added)
        read = LayerReads(x, base_heads, y, base_channels, inverse_rms)
        return x_BTD, u_BTE, read, LayerReads(u, added_heads, z, added_channels, inverse_rms)

    def _weights(self) -> Weights:
        linears = (child for child in self.children() if isinstance(child, ExpansionLinear))
        return lower_weights(weight for linear in linears for weight in linear.parameters())

    def _norm(self, name: str | None, inverse_rms: InverseRms, u: Tensor) -> Tensor:
        """Return u^ by the added gains that belong to one of the base's norms; without a norm, return u."""
        if name is None:
            return u.to(product_dtype(u))
        normed: Tensor = getattr(self, name)(inverse_rms[name], u)
        return normed

    def _heads(
        self,
        attention: Any,
        x: Tensor,
        u: Tensor,
        inverse_rms: InverseRms,
        weights: Weights,
        context: LayerContext,
        slot: int,
    ) -> Tensor:
        q, k, v = (linear(x, u, weights) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            self._norm(name, inverse_rms, own)
            for name, own in zip(context.family.width_norms, (q, k), strict=True)
        )
        return attend(attention, q, k, v, context, slot)

    def _channels(self, mlp: Any, x: Tensor, u: Tensor, weights: Weights, family: Family) -> Tensor:
        return family.channels(mlp, self.gate_proj(x, u, weights), self.up_proj(x, u, weights))


class Expansion(nn.Module):
    """Everything that one expansion adds to the plain model `base`; `below` lists the expansions under this one."""

    layers: nn.ModuleList

    def __init__(self, base: Any, below: Sequence[Expansion], config: ScaleConfig) -> None:
        super().__init__()
        decoder, family = base.model, family_of(base.config)
        self.first_collaborating_layer = config.first_collaborating_layer
        self.new_tokens = (
            NewTokens(base, config.pieces(), config.own_pieces) if config.new_tokens else None
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.layers = nn.ModuleList(
            ExpansionLayer(
                family,
                base_layer,
                [cast(ExpansionLayer, e.layers[index]) for e in below],
                config,
                index,
            )
            for index, base_layer in enumerate(decoder.layers)
        )
        self.norm = ExpansionNorm(config.expansion_hidden_size)
        self.lm_head = nn.Linear(config.expansion_hidden_size, config.vocab_size, bias=False)
