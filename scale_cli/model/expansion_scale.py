"""What is added to a frozen decoder: widened linear maps, norms, heads and MLP channels, layer by layer.

Every linear map W of the decoder is widened in both directions; W itself is never touched:

    [ y  ]   [ W    W12 ] [ x ]        x : base stream,      D channels
    [ y' ] = [ W21  W22 ] [ u ]        u : expansion stream, E channels

Shapes: B batch, T positions, D base channels, E expansion channels, N attention heads, A channels a head.
A tensor that several sizes fit carries no suffix.

Source: SCALE, arXiv 2511.03270; the norm of both streams by the base stream's RMS is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .cache_scale import ScaleCache
from .configuration_scale import ScaleConfig
from .fused_scale import add_product, gated, product_dtype, rotate, two_stream_norm


class ExpansionLinear(nn.Module):
    """The blocks that widen one frozen linear map: W21 and W22, and W12 where the expansion collaborates.

    W12 is absent, not zero, where nothing is to be written into the base stream: no parameter, no product, and a
    non-finite u cannot reach x.
    """

    def __init__(self, base_linear: nn.Linear, in_features: int, out_features: int, *, collaborates: bool) -> None:
        super().__init__()
        self.weight_21 = nn.Parameter(torch.empty(out_features, base_linear.in_features))
        self.weight_22 = nn.Parameter(torch.empty(out_features, in_features))
        weight_12 = torch.empty(base_linear.out_features, in_features) if collaborates else None
        self.weight_12 = None if weight_12 is None else nn.Parameter(weight_12)
        bias_2 = None if base_linear.bias is None else torch.empty(out_features)
        self.bias_2 = None if bias_2 is None else nn.Parameter(bias_2)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        """Return y' = W21 x + W22 u: two products, so that none computes a gradient for a frozen x."""
        read = F.linear(x.flatten(0, -2).to(product_dtype(self.weight_21)), self.weight_21, self.bias_2)
        return add_product(read, u.flatten(0, -2), self.weight_22).unflatten(0, x.shape[:-1])

    def collaborate(self, base_linear: nn.Linear, x: Tensor, u: Tensor) -> Tensor:
        """Return y = W x + W12 u, or W x alone where W12 does not exist."""
        if self.weight_12 is None:
            return base_linear(x)
        return add_product(base_linear(x.flatten(0, -2)), u.flatten(0, -2), self.weight_12).unflatten(0, x.shape[:-1])


class ExpansionNorm(nn.Module):
    """Gains of the expansion stream, normalised by the base stream's own RMS: u^ = g' u / rms(x).

    x^ stays untouched, so preservation is exact, and the widened model is exactly a plain Llama (README, "Export").
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, base_norm: Any, x_BTD: Tensor, u_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return x^ by the base's own norm, and u^; statistics in float32."""
        return two_stream_norm(base_norm, x_BTD, u_BTE, self.weight)


@dataclass
class LayerContext:
    """What every layer of one forward pass shares."""

    position_embeddings: tuple[Tensor, Tensor]
    attention_mask: Any  # Tensor, BlockMask or None: whatever transformers' attention functions take
    cache: ScaleCache | None
    num_layers: int


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, slot: int) -> Tensor:
    """Return causal attention over heads of the base's head_dim: (B, T, N A) from projections of that shape.

    `attention` is the base's module; transformers' attention functions read head ratio and scale from it, and both
    are the same for added heads.
    """
    shape = (*q.shape[:-1], -1, attention.head_dim)
    q_BNTA, k_BNTA, v_BNTA = (states.view(shape).transpose(1, 2) for states in (q, k, v))
    q_BNTA, k_BNTA = rotate(q_BNTA, k_BNTA, *context.position_embeddings)
    if context.cache is not None:
        k_BNTA, v_BNTA = context.cache.update(k_BNTA, v_BNTA, slot)
    implementation = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    attended, _ = function(
        attention, q_BNTA, k_BNTA, v_BNTA, context.attention_mask, dropout=0.0, scaling=attention.scaling
    )
    return attended.reshape(*shape[:-2], -1).contiguous()


class ExpansionLayer(nn.Module):
    """What one decoder layer gains: heads, MLP channels, and the blocks between the two streams."""

    def __init__(self, base_layer: Any, config: ScaleConfig, layer_index: int) -> None:
        super().__init__()
        attention, mlp = base_layer.self_attn, base_layer.mlp
        hidden_size, intermediate_size = config.expansion_hidden_size, config.expansion_intermediate_size
        query_size = config.expansion_num_attention_heads * attention.head_dim
        key_value_size = config.expansion_num_key_value_heads * attention.head_dim
        in_attention = layer_index in config.attention_collaboration_layers
        in_mlp = layer_index in config.mlp_collaboration_layers
        self.layer_index = layer_index
        self.input_layernorm = ExpansionNorm(hidden_size)
        self.q_proj = ExpansionLinear(attention.q_proj, hidden_size, query_size, collaborates=in_attention)
        self.k_proj = ExpansionLinear(attention.k_proj, hidden_size, key_value_size, collaborates=in_attention)
        self.v_proj = ExpansionLinear(attention.v_proj, hidden_size, key_value_size, collaborates=in_attention)
        self.o_proj = ExpansionLinear(attention.o_proj, query_size, hidden_size, collaborates=in_attention)
        self.post_attention_layernorm = ExpansionNorm(hidden_size)
        self.gate_proj = ExpansionLinear(mlp.gate_proj, hidden_size, intermediate_size, collaborates=in_mlp)
        self.up_proj = ExpansionLinear(mlp.up_proj, hidden_size, intermediate_size, collaborates=in_mlp)
        self.down_proj = ExpansionLinear(mlp.down_proj, intermediate_size, hidden_size, collaborates=in_mlp)

    def forward(
        self, base_layer: Any, x_BTD: Tensor, u_BTE: Tensor, context: LayerContext, base_slot: int
    ) -> tuple[Tensor, Tensor]:
        """Return both streams after this layer.

        Where x needs no gradient (below every collaborating layer: always in Preserve) autograd records nothing for
        the base's products; they cost a forward pass and no more.
        """
        x_BTD, u_BTE = self._attention(base_layer, x_BTD, u_BTE, context, base_slot)
        return self._mlp(base_layer, x_BTD, u_BTE)

    def _attention(
        self, base_layer: Any, x_BTD: Tensor, u_BTE: Tensor, context: LayerContext, base_slot: int
    ) -> tuple[Tensor, Tensor]:
        attention = base_layer.self_attn
        x, u = self.input_layernorm(base_layer.input_layernorm, x_BTD, u_BTE)
        q, k, v = (
            widened.collaborate(frozen, x, u)
            for frozen, widened in (
                (attention.q_proj, self.q_proj),
                (attention.k_proj, self.k_proj),
                (attention.v_proj, self.v_proj),
            )
        )
        base_heads = attend(attention, q, k, v, context, base_slot)
        added_slot = context.num_layers + self.layer_index
        added_heads = attend(attention, self.q_proj(x, u), self.k_proj(x, u), self.v_proj(x, u), context, added_slot)
        x_BTD = x_BTD + self.o_proj.collaborate(attention.o_proj, base_heads, added_heads)
        return x_BTD, u_BTE + self.o_proj(base_heads, added_heads)

    def _mlp(self, base_layer: Any, x_BTD: Tensor, u_BTE: Tensor) -> tuple[Tensor, Tensor]:
        mlp = base_layer.mlp
        x, u = self.post_attention_layernorm(base_layer.post_attention_layernorm, x_BTD, u_BTE)
        gate = self.gate_proj.collaborate(mlp.gate_proj, x, u)
        base_channels = gated(mlp.act_fn, gate, self.up_proj.collaborate(mlp.up_proj, x, u))
        added_channels = gated(mlp.act_fn, self.gate_proj(x, u), self.up_proj(x, u))
        x_BTD = x_BTD + self.down_proj.collaborate(mlp.down_proj, base_channels, added_channels)
        return x_BTD, u_BTE + self.down_proj(base_channels, added_channels)


class Expansion(nn.Module):
    """Everything that is added to a base model, and everything that trains."""

    def __init__(self, base: Any, config: ScaleConfig) -> None:
        super().__init__()
        decoder = base.model
        self.embed_tokens = nn.Embedding(decoder.embed_tokens.num_embeddings, config.expansion_hidden_size)
        self.layers = nn.ModuleList(
            ExpansionLayer(base_layer, config, index) for index, base_layer in enumerate(decoder.layers)
        )
        self.norm = ExpansionNorm(config.expansion_hidden_size)
        self.lm_head = nn.Linear(config.expansion_hidden_size, decoder.embed_tokens.num_embeddings, bias=False)
