"""What is added to each layer of a frozen decoder: heads, MLP channels, and maps between streams.

Every linear map W of the decoder is widened in both directions; W itself is never touched:

    [ y  ]   [ W    W12 ] [ x ]        x : base stream,      D channels
    [ y' ] = [ W21  W22 ] [ u ]        u : expansion stream, E channels

but for the MLP's gate, which reads x alone: it has W21, no W12 and no W22. So what a sublayer writes
grows at most as u does, however large u becomes.

A layer has two sublayers, attention and then the MLP (`family_scale.py`). In each of them:

    1. u^ is u by its own gains and the RMS of x
    2. the reading maps: y + W12 u^ for the base, W21 x^ + W22 u^ for the expansion
    3. the channels of the sublayer: the heads' outputs, or act(gate) up, of each stream apart
    4. the writing map: y + W12 of the added channels into x, and then W21 of the base's channels +
       W22 of the added ones into u

`walk` takes the base stream through one layer, and `AddedStream` takes u through the same sublayers.
Without W12 the base walks first and alone, and the expansion follows.

Shapes: B batch, T positions, D base channels, E expansion channels, N attention heads, A channels
a head. A tensor that may have several shapes carries no suffix.

Source: SCALE, arXiv 2511.03270; normalising both streams by the base stream's RMS is ours, and so is
a gate that reads x alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_scale import ScaleConfig
from .family_scale import ATTENTION, MLP, SUBLAYERS, Family, Sublayer, family_of, linear_of
from .fused_scale import (
    add_product,
    cast_for_products,
    frozen_norm,
    gated,
    product_dtype,
    rotate,
)
from .vocabulary_scale import NewTokens

# From a parameter to its copy in the dtype of the products (`cast_for_products`).
Weights = dict[Tensor, Tensor]


class ExpansionLinear(nn.Module):
    """The blocks that widen one frozen linear map: W21, W22 if it reads u, and W12 if it reads u and
    the expansion writes here.

    A block that is to do nothing is absent, not zero: no parameter, no product, and without W12 a u
    that is not finite cannot reach x. `export/dense.py` joins the blocks into one plain map.
    """

    def __init__(
        self, frozen: nn.Linear, in_features: int, out_features: int, *, reads_u: bool, writes: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features  # of u
        self.weight_21 = nn.Parameter(torch.empty(out_features, frozen.in_features))
        self.weight_22 = nn.Parameter(torch.empty(out_features, in_features)) if reads_u else None
        self.weight_12 = (
            nn.Parameter(torch.empty(frozen.out_features, in_features))
            if reads_u and writes
            else None
        )
        self.bias_2 = None if frozen.bias is None else nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y' = W21 x + W22 u: two products, so that a frozen x gets no gradient; without W22,
        y' = W21 x.
        """
        weight_21 = weights[self.weight_21]
        bias_2 = None if self.bias_2 is None else weights[self.bias_2]
        read = F.linear(x.flatten(0, -2).to(weight_21.dtype), weight_21, bias_2)
        if self.weight_22 is not None:
            read = add_product(read, u.flatten(0, -2), weights[self.weight_22])
        return read.unflatten(0, x.shape[:-1])

    def collaborate(self, y: Tensor, u: Tensor, weights: Weights) -> Tensor:
        """Return y + W12 u, where y = W x may be overwritten; without W12, return y."""
        if self.weight_12 is None:
            return y
        written = add_product(y.flatten(0, -2), u.flatten(0, -2), weights[self.weight_12])
        return written.unflatten(0, y.shape[:-1])


class ExpansionNorm(nn.Module):
    """Norm of the expansion stream: its own gains, but the base stream's RMS: u^ = g' u / rms(x).

    x^ stays untouched, so preservation is exact, and the widened model is exactly a plain Llama
    (docs/serving.md).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, inverse_rms_BT1: Tensor, u_BTE: Tensor) -> Tensor:
        """Return u^ (B, T, E), computed in float32, in the dtype of the products that read it."""
        return (self.weight * (u_BTE.float() * inverse_rms_BT1)).to(product_dtype(u_BTE))


@dataclass
class LayerContext:
    """Values that all layers of one forward pass share."""

    family: Family
    position_ids: Tensor
    # By `Family.rotary_kind`: cosines and sines as the base computes them, and `rotation_angles`.
    rotary: dict[str | None, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
    # keyed by whether the layer has a window; a Tensor, BlockMask or None, as transformers'
    # attention functions take it
    attention_masks: dict[bool, Any]
    cache: DynamicCache | None
    num_layers: int
    checkpointing: bool = False  # whether backward computes the trained part's activations again

    def slot(self, stream: int, layer_index: int) -> int:
        """Return the layer of the cache that holds a stream's heads in one layer of the model.

        Stream 0 is the base, 1 the expansion. 2 is the stream into which the expansion writes, from
        the lowest such layer up, where the untouched one is stream 0 because it is served too.

        Without a cache it is the same for all layers: of another number torch.compile compiles anew.
        """
        return 0 if self.cache is None else stream * self.num_layers + layer_index

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of a layer; with checkpointing, keep only its inputs for backward."""
        if not self.checkpointing:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def attend(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, slot: int
) -> Tensor:
    """Return causal attention over heads of the base's head_dim: (B, T, N A) from projections of
    that shape.

    `attention` is the base's module; transformers' attention functions read head ratio and scale
    from it. Both are the same for added heads, and so are the gains of a norm over each head's
    channels, if the family has one. Window and positions are passed beside the mask: flash
    attention reads them, and finds in the positions where documents begin.
    """
    family = context.family
    window = family.window_of(attention)
    shape = (*q.shape[:-1], -1, attention.head_dim)
    q_BTNA, k_BTNA, v_BTNA = (states.view(shape) for states in (q, k, v))
    if family.head_norms is not None:
        q_norm, k_norm = family.head_norms
        q_BTNA = getattr(attention, q_norm)(q_BTNA)
        k_BTNA = getattr(attention, k_norm)(k_BTNA)
    if family.is_rotated(attention):
        rotary = context.rotary[family.rotary_kind(attention)]
        q_BNTA, k_BNTA = rotate(q_BTNA, k_BTNA, *rotary)
    else:
        q_BNTA = q_BTNA.transpose(1, 2)
        k_BNTA = k_BTNA.transpose(1, 2)
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


@dataclass
class LayerReads:
    """What one layer's maps read from the base stream, and the sizes by which its norms divide."""

    # Of each sublayer: the input (B, T, D) of the maps that read the stream, and that of the map that
    # writes into it.
    sublayers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # By the name of a norm of the base: 1 / rms of its input, (B, T, 1).
    inverse_rms: dict[str, Tensor] = field(default_factory=dict)


def sublayer_channels(
    sublayer: Sublayer,
    module: Any,
    products: Sequence[Tensor],
    norm: Callable[[str | None, Tensor], Tensor],
    context: LayerContext,
    slot: int,
) -> Tensor:
    """Return what a sublayer's writing map reads: attention's heads, or the MLP's channels act(gate)
    up.

    `module` is the base's; `norm` applies a norm over all queries, or all keys, by its name.
    """
    if sublayer is MLP:
        return gated(module.act_fn, *products)
    q, k, v = products
    q_norm, k_norm = context.family.width_norms
    return attend(module, norm(q_norm, q), norm(k_norm, k), v, context, slot)


def walk(
    base_layer: Any,
    x_BTD: Tensor,
    context: LayerContext,
    slot: int,
    added: AddedStream | None = None,
) -> tuple[Tensor, LayerReads]:
    """Return the base stream after one of its own layers, and what that layer's linear maps have
    read.

    `added` is the stream of an expansion that writes into x on the way.
    """
    reads = LayerReads() if added is None else added.reads

    def norm(owner: Any, name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        normed, reads.inverse_rms[name] = frozen_norm(
            getattr(owner, name), context.family.norm_form, x
        )
        return normed

    for sublayer in SUBLAYERS:
        module = getattr(base_layer, sublayer.owner)
        before, after = context.family.norms_around(sublayer)
        read = norm(base_layer, before, x_BTD)
        products = [getattr(module, name)(read) for name in sublayer.reading]
        if added is not None:
            added.normalise(sublayer)
            products = [
                getattr(added.layer, name).collaborate(y, added.normed, added.weights)
                for name, y in zip(sublayer.reading, products, strict=True)
            ]

        channels = sublayer_channels(
            sublayer, module, products, partial(norm, module), context, slot
        )
        written = getattr(module, sublayer.writing)(channels)
        if added is not None:
            added.read(sublayer, read)
            linear = getattr(added.layer, sublayer.writing)
            written = linear.collaborate(written, added.channels, added.weights)
        x_BTD = x_BTD + norm(base_layer, after, written)
        if added is not None:
            added.write(sublayer, channels)
        reads.sublayers.append((read, channels))
    return x_BTD, reads


@dataclass
class AddedStream:
    """The stream u on its way through one layer, sublayer by sublayer beside the base
    stream.
    """

    layer: ExpansionLayer
    base_layer: Any
    u_BTE: Tensor
    reads: LayerReads
    context: LayerContext
    slot: int
    weights: Weights = field(init=False)  # of the layer's maps
    normed: Tensor = field(init=False)  # u^, which the reading maps read
    channels: Tensor = field(init=False)  # of the sublayer, which its writing map reads

    def __post_init__(self) -> None:
        linears = (child for child in self.layer.children() if isinstance(child, ExpansionLinear))
        self.weights = cast_for_products(
            weight for linear in linears for weight in linear.parameters()
        )

    def normalise(self, sublayer: Sublayer) -> None:
        """Begin a sublayer: compute u^, which its reading maps read."""
        before, _ = self.context.family.norms_around(sublayer)
        self.normed = self._norm(before, self.u_BTE)

    def read(self, sublayer: Sublayer, of_base: Tensor) -> None:
        """Compute the added channels; `of_base` is what the base's own maps read."""
        products = [
            getattr(self.layer, name)(of_base, self.normed, self.weights)
            for name in sublayer.reading
        ]
        module = getattr(self.base_layer, sublayer.owner)
        self.channels = sublayer_channels(
            sublayer, module, products, self._norm, self.context, self.slot
        )

    def write(self, sublayer: Sublayer, of_base: Tensor) -> None:
        """End a sublayer: add to u what the added map writes; `of_base` has the base's channels."""
        _, after = self.context.family.norms_around(sublayer)
        written = getattr(self.layer, sublayer.writing)(of_base, self.channels, self.weights)
        self.u_BTE = self.u_BTE + self._norm(after, written)

    def _norm(self, name: str | None, u: Tensor) -> Tensor:
        """Return u^ by the added gains that belong to one of the base's norms; without a norm,
        return u.
        """
        if name is None:
            return u.to(product_dtype(u))
        normed: Tensor = getattr(self.layer, name)(self.reads.inverse_rms[name], u)
        return normed


class ExpansionLayer(nn.Module):
    """Everything added to one decoder layer: heads, MLP channels, gains, and the blocks between the
    two streams.

    Its maps and its norms have the names of the base's (`family_scale.py`).
    """

    o_proj: ExpansionLinear

    def __init__(
        self, family: Family, base_layer: Any, config: ScaleConfig, layer_index: int
    ) -> None:
        super().__init__()
        stream = config.expansion_hidden_size
        channels = config.expansion_intermediate_size
        queries = config.expansion_num_attention_heads * base_layer.self_attn.head_dim
        keys = config.expansion_num_key_value_heads * base_layer.self_attn.head_dim
        in_attention = layer_index in config.attention_collaboration_layers
        in_mlp = layer_index in config.mlp_collaboration_layers

        self.collaborates = in_attention or in_mlp
        for sublayer, sizes, collaborates in (
            (ATTENTION, [queries, keys, keys], in_attention),
            (MLP, [channels, channels], in_mlp),
        ):
            before, after = family.norms_around(sublayer)
            norms = [(before, stream)]
            if sublayer is ATTENTION:
                norms += zip(family.width_norms, (queries, keys), strict=True)
            for name, size in norms:
                if name is not None:
                    self.add_module(name, ExpansionNorm(size))

            maps = [
                (name, stream, size) for name, size in zip(sublayer.reading, sizes, strict=True)
            ]
            for name, num_in, num_out in [*maps, (sublayer.writing, sizes[0], stream)]:
                linear = ExpansionLinear(
                    linear_of(base_layer, name),
                    num_in,
                    num_out,
                    reads_u=name not in sublayer.reading_x_alone,
                    writes=collaborates,
                )
                self.add_module(name, linear)
            if after is not None:
                self.add_module(after, ExpansionNorm(stream))

    def forward(
        self,
        base_layer: Any,
        x_BTD: Tensor,
        u_BTE: Tensor,
        context: LayerContext,
        base_slot: int,
        own_slot: int,
    ) -> tuple[Tensor, Tensor]:
        """Return x and u after this layer.

        While nothing has written into x (below every collaborating layer; always in Preserve), the
        base layer runs alone and without autograd: it costs one forward pass, and is never computed
        twice.
        """
        if self.collaborates or x_BTD.requires_grad:
            return context.run(
                self._with_base, base_layer, x_BTD, u_BTE, context, base_slot, own_slot
            )
        with torch.no_grad():
            x_BTD, reads = walk(base_layer, x_BTD, context, base_slot)
        u_BTE = context.run(self._after_base, base_layer, u_BTE, reads, context, own_slot)
        return x_BTD, u_BTE

    def _with_base(
        self,
        base_layer: Any,
        x_BTD: Tensor,
        u_BTE: Tensor,
        context: LayerContext,
        base_slot: int,
        own_slot: int,
    ) -> tuple[Tensor, Tensor]:
        added = AddedStream(self, base_layer, u_BTE, LayerReads(), context, own_slot)
        x_BTD, _ = walk(base_layer, x_BTD, context, base_slot, added)
        return x_BTD, added.u_BTE

    def _after_base(
        self,
        base_layer: Any,
        u_BTE: Tensor,
        reads: LayerReads,
        context: LayerContext,
        own_slot: int,
    ) -> Tensor:
        added = AddedStream(self, base_layer, u_BTE, reads, context, own_slot)
        for sublayer, (read, channels) in zip(SUBLAYERS, reads.sublayers, strict=True):
            added.normalise(sublayer)
            added.read(sublayer, read)
            added.write(sublayer, channels)
        return added.u_BTE


class Expansion(nn.Module):
    """Everything that is added to the plain model `base`."""

    layers: nn.ModuleList

    def __init__(self, base: Any, config: ScaleConfig) -> None:
        super().__init__()
        family = family_of(base.config)
        self.first_collaborating_layer = config.first_collaborating_layer
        self.new_tokens = None
        if config.new_tokens:
            self.new_tokens = NewTokens(base, config.new_tokens, config.own_pieces)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.expansion_hidden_size)
        self.layers = nn.ModuleList(
            ExpansionLayer(family, base_layer, config, index)
            for index, base_layer in enumerate(base.model.layers)
        )
        self.norm = ExpansionNorm(config.expansion_hidden_size)
        self.lm_head = nn.Linear(config.expansion_hidden_size, config.vocab_size, bias=False)
        # Whether the expansion writes into x in any layer.
        self.writes = self.first_collaborating_layer < len(self.layers)
