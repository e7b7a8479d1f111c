"""The families of bases, and how each family's layer computes. No other module asks for a base's family.

A layer of any family has two steps, each with an RMSNorm before it, after it, or both:

    x = x + after_attention(o(heads(q, k, v)))      q, k, v of before_attention(x)
    x = x + after_mlp(down(act(gate) up))           gate, up of before_mlp(x)

Every norm has separate gains for the added channels, which it divides by the base's RMS. So the base keeps its bits,
and the widened model is a plain one (`export/dense.py`). Only norms over one head's channels serve added heads as is.

Shapes: B batch, T positions, D base channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .fused_scale import LLAMA_NORM, NormForm, gated, rotate, rotate_first, rotate_in_float32

# The linear maps of a layer that are widened, in order, and the module that holds each.
READ_BY_ATTENTION, READ_BY_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
OWNERS = {
    **dict.fromkeys((*READ_BY_ATTENTION, "o_proj"), "self_attn"),
    **dict.fromkeys((*READ_BY_MLP, "down_proj"), "mlp"),
}


@dataclass(frozen=True)
class Family:
    """How a family's decoder computes; the defaults are Llama's. A norm is given by its module's name, or None.

    A family with another layout of its maps (one matrix for q, k and v) overrides the methods.
    """

    class_name: str  # of transformers' and vLLM's classes, before ForCausalLM
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    width_norms: tuple[str | None, str | None] = (
        None,
        None,
    )  # of all queries together, of all keys together
    head_norms: tuple[str, str] | None = None  # of each head's queries, of each head's keys
    norm_form: NormForm = LLAMA_NORM
    # The attention window in positions, the current one included; None for full attention.
    window_of: Callable[[Any], int | None] = lambda _: None
    # The layer type to pass to the decoder's rotary embedding; None if all layers share one.
    rotary_kind: Callable[[Any], str | None] = lambda _: None
    # Whether a layer has an MLP that is widened; a sparse MLP is not widened, and reads and writes x alone.
    has_mlp: Callable[[Any, int], bool] = lambda _config, _layer: True
    is_rotated: Callable[[Any], bool] = lambda _: (
        True
    )  # whether an attention rotates its queries and keys at all
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotate
    heads_divide_channels: bool = (
        False  # whether its configuration requires hidden_size % num_attention_heads == 0
    )
    # The text length beyond which all positions are rotated by other angles; None if there is no such length.
    short_up_to: Callable[[Any], int | None] = lambda _: None
    channels_multiple: int = (
        1  # the family's products need a hidden_size that is a multiple of this
    )
    refused: tuple[str, ...] = ()  # keys of its config.json that must be null or false

    def linear(self, base_layer: Any, name: str) -> nn.Linear:
        linear: nn.Linear = getattr(getattr(base_layer, OWNERS[name]), name)
        return linear

    def module_name(self, name: str) -> str:
        return name

    def queries_keys_values(self, attention: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the base's own products as new tensors, because W12 is added in place."""
        return attention.q_proj(x_BTD), attention.k_proj(x_BTD), attention.v_proj(x_BTD)

    def gate_up(self, mlp: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the base's own products as new tensors, because W12 is added in place."""
        return mlp.gate_proj(x_BTD), mlp.up_proj(x_BTD)

    def channels(self, mlp: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of down, for the base's channels or for added ones."""
        return gated(mlp.act_fn, gate, up)

    def rotary(
        self, decoder: Any, x_BTD: Tensor, position_ids: Tensor, kind: str | None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as the base computes them, for layers of one kind."""
        asked = () if kind is None else (kind,)
        embeddings: tuple[Tensor, Tensor] = decoder.rotary_emb(x_BTD, position_ids, *asked)
        return embeddings

    def embedding_factor(self, embedding: Any) -> Tensor | float:
        """Return the decoder's factor on embedding rows: for Gemma, the square root of the stream's width; else 1."""
        factor: Tensor | None = getattr(embedding, "embed_scale", None)
        return 1.0 if factor is None else factor.to(embedding.weight.dtype)

    def token_rows(self, base: Any) -> Tensor:
        """Return (V, D): x_0 of every token, not yet rounded to the base's dtype."""
        embedding = base.model.embed_tokens
        factor = self.embedding_factor(embedding)
        return embedding.weight if isinstance(factor, float) else embedding.weight.float() * factor

    def packed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return a layer's tensors in a plain model's layout, from one tensor per map of `OWNERS` and per norm."""
        return tensors

    @torch.no_grad()
    def silence(self, layer: Any) -> None:
        """Make a layer add nothing: set its output maps to 0, or the gains of a norm after them if there is one."""
        for norm, writing in ((self.after_attention, "o_proj"), (self.after_mlp, "down_proj")):
            for name, parameter in layer.named_parameters():
                if (norm or writing) in name.split("."):
                    nothing = torch.zeros_like(parameter)
                    parameter.copy_(nothing if norm is None else self.norm_form.weight(nothing))

    @property
    def norms_of_read(self) -> list[str]:
        """The norms on a layer's inputs from the stream."""
        return [name for name in (self.before_attention, self.before_mlp) if name is not None]

    @property
    def norms_of_written(self) -> list[str]:
        """The norms on a layer's outputs into the stream."""
        return [name for name in (self.after_attention, self.after_mlp) if name is not None]


# Functions, not `attrgetter`s: torch.compile must trace them.
def _own_window(attention: Any) -> int | None:
    window: int | None = attention.sliding_window
    return window


def _window_of_all(attention: Any) -> int | None:
    window: int | None = attention.config.sliding_window
    return window


# The maps whose rows make up one matrix of Phi, in their order.
_PACKED = {"qkv_proj": READ_BY_ATTENTION, "gate_up_proj": READ_BY_MLP}
_PACKED_IN = {name: packed for packed, names in _PACKED.items() for name in names}


class _Phi(Family):
    """q, k and v are rows of one matrix, and so are gate and up: each product is computed once and sliced."""

    def linear(self, base_layer: Any, name: str) -> nn.Linear:
        """Return a map; for one in a packed matrix, a view of its rows."""
        if name not in _PACKED_IN:
            return super().linear(base_layer, name)
        weight = getattr(getattr(base_layer, OWNERS[name]), _PACKED_IN[name]).weight.detach()
        sizes = (
            [len(weight) // 2] * 2
            if OWNERS[name] == "mlp"
            else self._head_sizes(base_layer.self_attn)
        )
        rows = weight.split(sizes)[_PACKED[_PACKED_IN[name]].index(name)]
        part = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        part.weight = nn.Parameter(rows, requires_grad=False)
        return part

    def module_name(self, name: str) -> str:
        return _PACKED_IN.get(name, name)

    def queries_keys_values(self, attention: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k, _ = self._head_sizes(attention)
        qkv = attention.qkv_proj(
            x_BTD
        )  # sliced below: the results of `split` must not be changed in place
        return qkv[..., :of_q], qkv[..., of_q : of_q + of_k], qkv[..., of_q + of_k :]

    def gate_up(self, mlp: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        gate_up = mlp.gate_up_proj(x_BTD)
        middle = gate_up.shape[-1] // 2
        return gate_up[..., :middle], gate_up[..., middle:]

    def channels(self, mlp: Any, gate: Tensor, up: Tensor) -> Tensor:
        return gated(mlp.activation_fn, gate, up)

    def packed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        parts: list[Tensor] = []
        for path, tensor in tensors:
            owner, *names = path.split(".")
            packed = _PACKED_IN.get(names[0])
            if packed is None:
                yield path, tensor
                continue
            parts.append(tensor)
            if names[0] == _PACKED[packed][-1]:
                yield f"{owner}.{packed}.weight", torch.cat(parts)
                parts = []

    @staticmethod
    def _head_sizes(attention: Any) -> list[int]:
        heads = attention.config.num_attention_heads, *[attention.config.num_key_value_heads] * 2
        return [num_heads * attention.head_dim for num_heads in heads]


def _is_dense(config: Any, layer: int) -> bool:
    return layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step > 0


def _original_length(config: Any) -> int | None:
    length: int | None = config.rope_parameters.get("original_max_position_embeddings")
    return length if config.rope_parameters["rope_type"] == "longrope" else None


_QUERIES_KEYS = ("q_norm", "k_norm")
_NORMED_AFTER: dict[str, Any] = {
    "before_attention": None,
    "after_attention": "post_attention_layernorm",
    "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}


FAMILIES: dict[str, Family] = {  # by `model_type`
    "llama": Family("Llama", heads_divide_channels=True),
    "mistral": Family("Mistral", window_of=_window_of_all),
    "qwen2": Family("Qwen2", window_of=_own_window),
    "qwen3": Family("Qwen3", window_of=_own_window, head_norms=_QUERIES_KEYS),
    "gemma3_text": Family(
        "Gemma3",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        head_norms=_QUERIES_KEYS,
        norm_form=NormForm("eps", offset=1.0),
        window_of=_own_window,
        rotary_kind=lambda attention: attention.layer_type,
        heads_divide_channels=True,
        refused=(
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ),
    ),
    "olmo2": Family("Olmo2", **_NORMED_AFTER, width_norms=_QUERIES_KEYS, rotate=rotate_in_float32),
    "olmo3": Family(
        "Olmo3",
        **_NORMED_AFTER,
        width_norms=_QUERIES_KEYS,
        window_of=_own_window,
        rotary_kind=lambda attention: attention.attention_type,
        rotate=rotate_in_float32,
    ),
    "exaone4": Family(
        "Exaone4",
        **_NORMED_AFTER,
        head_norms=_QUERIES_KEYS,
        window_of=lambda attention: attention.sliding_window if attention.is_sliding else None,
        # In a model that has layers with a window, the others use no positions.
        is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        window_of=_own_window,
        head_norms=_QUERIES_KEYS,
        has_mlp=_is_dense,
        channels_multiple=8,
    ),
    "phi3": _Phi(
        "Phi3", window_of=_window_of_all, rotate=rotate_first, short_up_to=_original_length
    ),
}


def family_of(config: Any) -> Family:
    return FAMILIES[config.model_type]
