"""What is added to a frozen decoder: widened linear maps, norms, heads and MLP channels, layer by layer.

Every linear map W of the decoder is widened in both directions; W itself is never touched:

    [ y  ]   [ W    W12 ] [ x ]        x : base stream,      D channels
    [ y' ] = [ W21  W22 ] [ u ]        u : expansion stream, E channels

An expansion may stand upon other expansions: W21 then reads x and their streams, joined.

Shapes: B batch, T positions, D base channels, E expansion channels, N attention heads, A channels a head.
A tensor that several sizes fit carries no suffix.

Source: SCALE, arXiv 2511.03270; the norm of both streams by the base stream's RMS is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .cache_scale import ScaleCache
from .configuration_scale import ScaleConfig
from .fused_scale import add_product, frozen_norm, gated, lower_weights, product_dtype, rotate, rotation_angles
from .vocabulary_scale import NewTokens

Weights = dict[Tensor, Tensor]  # what products read of an expansion's parameters (`lower_weights`)


class ExpansionLinear(nn.Module):
    """The blocks that widen one frozen linear map: W21 and W22, and W12 where the expansion collaborates.

    W12 is absent, not zero, where nothing is to be written into the base stream: no parameter, no product, and a
    non-finite u cannot reach x. `below` is what widens W already, bottom up; W21 reads their channels after the base's.
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
        self.weight_12 = nn.Parameter(torch.empty(base_linear.out_features, in_features)) if collaborates else None
        self.bias_2 = None if base_linear.bias is None else nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y' = W21 x + W22 u: two products, so that none computes a gradient for a frozen x."""
        weight_21, bias_2 = weights[self.weight_21], None if self.bias_2 is None else weights[self.bias_2]
        read = F.linear(x.flatten(0, -2).to(weight_21.dtype), weight_21, bias_2)
        return add_product(read, u.flatten(0, -2), weights[self.weight_22]).unflatten(0, x.shape[:-1])

    def collaborate(self, base_linear: nn.Linear, x: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y = W x + W12 u, or W x alone where W12 does not exist."""
        if self.weight_12 is None:
            return base_linear(x)
        y = base_linear(x.flatten(0, -2))
        return add_product(y, u.flatten(0, -2), weights[self.weight_12]).unflatten(0, x.shape[:-1])


class ExpansionNorm(nn.Module):
    """Gains of the expansion stream, normalised by the base stream's own RMS: u^ = g' u / rms(x).

    x^ stays untouched, so preservation is exact, and the widened model is exactly a plain Llama (docs/serving.md).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, inverse_rms_BT1: Tensor, u_BTE: Tensor) -> Tensor:
        """Return u^ (B, T, E), computed in float32, in what the products that read it are computed in."""
        return (self.weight * (u_BTE.float() * inverse_rms_BT1)).to(product_dtype(u_BTE))


@dataclass
class LayerContext:
    """What every layer of one forward pass shares."""

    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    attention_masks: list[Any]  # a layer's: Tensor, BlockMask or None, whatever transformers' attention functions take
    cache: ScaleCache | None
    num_layers: int
    checkpointing: bool = False  # activations of what trains are computed again in backward
    angles: tuple[Tensor, Tensor] = field(init=False)  # of `rotate`

    def __post_init__(self) -> None:
        self.angles = rotation_angles(*self.position_embeddings)

    def slot(self, stream: int, layer_index: int) -> int:
        """Return the cache's place for one stream's heads in one layer; stream 0 is the base."""
        return stream * self.num_layers + layer_index

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of a layer; where checkpointing, keep of it only what went in."""
        if not self.checkpointing:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def window_of(attention: Any) -> int | None:
    """Return how many positions one of the base's layers looks back over, itself included; None for all of them.

    A layer of Qwen's knows its own; Mistral's read it off their configuration; Llama's never look at it.
    """
    if hasattr(attention, "sliding_window"):
        return cast("int | None", attention.sliding_window)
    return attention.config.sliding_window if attention.config.model_type == "mistral" else None


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, slot: int) -> Tensor:
    """Return causal attention over heads of the base's head_dim: (B, T, N A) from projections of that shape.

    `attention` is the base's module; transformers' attention functions read head ratio and scale from it, and both
    are the same for added heads. So are the gains of a norm over each head's channels, where the family has one. What
    a kernel needs beside the mask goes with it: flash attention reads the window, and where documents begin off the
    positions.
    """
    shape = (*q.shape[:-1], -1, attention.head_dim)
    q_BTNA, k_BTNA, v_BTNA = (states.view(shape) for states in (q, k, v))
    if hasattr(attention, "q_norm"):
        q_BTNA, k_BTNA = attention.q_norm(q_BTNA), attention.k_norm(k_BTNA)
    q_BNTA, k_BNTA = rotate(q_BTNA, k_BTNA, context.position_embeddings, context.angles)
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
        context.attention_masks[attention.layer_idx],
        dropout=0.0,
        scaling=attention.scaling,
        sliding_window=window_of(attention),
        position_ids=context.position_ids,
    )
    return attended.reshape(*shape[:-2], -1).contiguous()


@dataclass
class LayerReads:
    """What the blocks that are added to a layer read of the streams that are there already."""

    attention_BTD: Tensor  # what q, k, v read
    attention_inverse_rms_BT1: Tensor  # of the base stream before the first norm
    heads: Tensor  # (B, T, N A), what o reads
    mlp_BTD: Tensor  # what gate and up read
    mlp_inverse_rms_BT1: Tensor  # of the base stream before the second norm
    channels: Tensor  # (B, T, MLP channels), what down reads

    def joined(self, above: LayerReads) -> LayerReads:
        """Return what is read by an expansion that stands upon these streams and the one above them."""
        return LayerReads(
            torch.cat([self.attention_BTD, above.attention_BTD], dim=-1),
            self.attention_inverse_rms_BT1,
            torch.cat([self.heads, above.heads], dim=-1),
            torch.cat([self.mlp_BTD, above.mlp_BTD], dim=-1),
            self.mlp_inverse_rms_BT1,
            torch.cat([self.channels, above.channels], dim=-1),
        )


def read_base(base_layer: Any, x_BTD: Tensor, context: LayerContext, slot: int) -> tuple[Tensor, LayerReads]:
    """Return the base stream after one of its own layers, and what the added blocks read of that layer."""
    attention, mlp = base_layer.self_attn, base_layer.mlp
    x, attention_inverse_rms = frozen_norm(base_layer.input_layernorm, x_BTD)
    heads = attend(attention, attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), context, slot)
    x_BTD = x_BTD + attention.o_proj(heads)
    y, mlp_inverse_rms = frozen_norm(base_layer.post_attention_layernorm, x_BTD)
    channels = gated(mlp.act_fn, mlp.gate_proj(y), mlp.up_proj(y))
    read = LayerReads(x, attention_inverse_rms, heads, y, mlp_inverse_rms, channels)
    return x_BTD + mlp.down_proj(channels), read


@dataclass
class LayerStep:
    """What an expansion's layer leaves to those that read the same streams, or its own too."""

    below: LayerReads  # what it read
    own: LayerReads  # what its own stream gave


class ExpansionLayer(nn.Module):
    """What one decoder layer gains: heads, MLP channels, and the blocks between the two streams."""

    def __init__(self, base_layer: Any, below: Sequence[ExpansionLayer], config: ScaleConfig, layer_index: int) -> None:
        super().__init__()
        attention, mlp = base_layer.self_attn, base_layer.mlp
        hidden_size, intermediate_size = config.expansion_hidden_size, config.expansion_intermediate_size
        query_size = config.expansion_num_attention_heads * attention.head_dim
        key_value_size = config.expansion_num_key_value_heads * attention.head_dim
        in_attention = layer_index in config.attention_collaboration_layers
        in_mlp = layer_index in config.mlp_collaboration_layers

        def widened(name: str, in_features: int, out_features: int) -> ExpansionLinear:
            in_this = in_attention if hasattr(attention, name) else in_mlp
            frozen = getattr(attention if hasattr(attention, name) else mlp, name)
            linears = [getattr(layer, name) for layer in below]
            return ExpansionLinear(frozen, linears, in_features, out_features, collaborates=in_this)

        self.layer_index = layer_index
        self.collaborates = in_attention or in_mlp
        self.input_layernorm = ExpansionNorm(hidden_size)
        self.q_proj = widened("q_proj", hidden_size, query_size)
        self.k_proj = widened("k_proj", hidden_size, key_value_size)
        self.v_proj = widened("v_proj", hidden_size, key_value_size)
        self.o_proj = widened("o_proj", query_size, hidden_size)
        self.post_attention_layernorm = ExpansionNorm(hidden_size)
        self.gate_proj = widened("gate_proj", hidden_size, intermediate_size)
        self.up_proj = widened("up_proj", hidden_size, intermediate_size)
        self.down_proj = widened("down_proj", intermediate_size, hidden_size)

    def forward(
        self, base_layer: Any, x_BTD: Tensor, u_BTE: Tensor, context: LayerContext, base_slot: int, own_slot: int
    ) -> tuple[Tensor, Tensor, LayerStep]:
        """Return both streams after this layer, and what it leaves to be read.

        Where nothing has written into x (below every collaborating layer: always in Preserve) the base layer runs by
        itself, without autograd: it costs a forward pass and no more, and is never computed twice.
        """
        if self.collaborates or x_BTD.requires_grad:
            return context.run(self._both, base_layer, x_BTD, u_BTE, context, base_slot, own_slot)
        with torch.no_grad():
            x_BTD, read = read_base(base_layer, x_BTD, context, base_slot)
        return x_BTD, *self.read_on(base_layer, read, u_BTE, context, own_slot)

    def read_on(
        self, base_layer: Any, read: LayerReads, u_BTE: Tensor, context: LayerContext, own_slot: int
    ) -> tuple[Tensor, LayerStep]:
        """Return the expansion stream after this layer, where what it reads has been computed already."""
        return context.run(self._added, base_layer, read, u_BTE, context, own_slot)

    def _added(
        self, base_layer: Any, read: LayerReads, u_BTE: Tensor, context: LayerContext, own_slot: int
    ) -> tuple[Tensor, LayerStep]:
        weights = self._weights()
        u = self.input_layernorm(read.attention_inverse_rms_BT1, u_BTE)
        heads = self._heads(base_layer.self_attn, read.attention_BTD, u, weights, context, own_slot)
        u_BTE = u_BTE + self.o_proj(read.heads, heads, weights)
        y = self.post_attention_layernorm(read.mlp_inverse_rms_BT1, u_BTE)
        channels = self._channels(base_layer.mlp, read.mlp_BTD, y, weights)
        own = LayerReads(u, read.attention_inverse_rms_BT1, heads, y, read.mlp_inverse_rms_BT1, channels)
        return u_BTE + self.down_proj(read.channels, channels, weights), LayerStep(read, own)

    def _both(
        self, base_layer: Any, x_BTD: Tensor, u_BTE: Tensor, context: LayerContext, base_slot: int, own_slot: int
    ) -> tuple[Tensor, Tensor, LayerStep]:
        attention, mlp, weights = base_layer.self_attn, base_layer.mlp, self._weights()
        x, inverse_rms = frozen_norm(base_layer.input_layernorm, x_BTD)
        u = self.input_layernorm(inverse_rms, u_BTE)
        q = self.q_proj.collaborate(attention.q_proj, x, u, weights)
        k = self.k_proj.collaborate(attention.k_proj, x, u, weights)
        v = self.v_proj.collaborate(attention.v_proj, x, u, weights)
        base_heads = attend(attention, q, k, v, context, base_slot)
        added_heads = self._heads(attention, x, u, weights, context, own_slot)
        x_BTD = x_BTD + self.o_proj.collaborate(attention.o_proj, base_heads, added_heads, weights)
        u_BTE = u_BTE + self.o_proj(base_heads, added_heads, weights)
        y, mlp_inverse_rms = frozen_norm(base_layer.post_attention_layernorm, x_BTD)
        z = self.post_attention_layernorm(mlp_inverse_rms, u_BTE)
        gate = self.gate_proj.collaborate(mlp.gate_proj, y, z, weights)
        base_channels = gated(mlp.act_fn, gate, self.up_proj.collaborate(mlp.up_proj, y, z, weights))
        added_channels = self._channels(mlp, y, z, weights)
        step = LayerStep(
            LayerReads(x, inverse_rms, base_heads, y, mlp_inverse_rms, base_channels),
            LayerReads(u, inverse_rms, added_heads, z, mlp_inverse_rms, added_channels),
        )
        x_BTD = x_BTD + self.down_proj.collaborate(mlp.down_proj, base_channels, added_channels, weights)
        return x_BTD, u_BTE + self.down_proj(base_channels, added_channels, weights), step

    def _weights(self) -> Weights:
        linears = (child for child in self.children() if isinstance(child, ExpansionLinear))
        return lower_weights(weight for linear in linears for weight in linear.parameters())

    def _heads(
        self, attention: Any, x: Tensor, u: Tensor, weights: Weights, context: LayerContext, slot: int
    ) -> Tensor:
        q, k, v = (linear(x, u, weights) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return attend(attention, q, k, v, context, slot)

    def _channels(self, mlp: Any, x: Tensor, u: Tensor, weights: Weights) -> Tensor:
        return gated(mlp.act_fn, self.gate_proj(x, u, weights), self.up_proj(x, u, weights))


class Expansion(nn.Module):
    """Everything that one expansion adds to the plain model `base`; `below` are the expansions between them."""

    layers: nn.ModuleList

    def __init__(self, base: Any, below: Sequence[Expansion], config: ScaleConfig) -> None:
        super().__init__()
        decoder = base.model
        self.first_collaborating_layer = config.first_collaborating_layer
        self.new_tokens = NewTokens(base, config.pieces(), config.own_pieces) if config.new_tokens else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.layers = nn.ModuleList(
            ExpansionLayer(base_layer, [cast(ExpansionLayer, e.layers[index]) for e in below], config, index)
            for index, base_layer in enumerate(decoder.layers)
        )
        self.norm = ExpansionNorm(config.expansion_hidden_size)
        self.lm_head = nn.Linear(config.expansion_hidden_size, config.vocab_size, bias=False)
