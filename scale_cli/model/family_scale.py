"""The families of bases, and how each family's layer computes. No other module asks for a base's
family.

A layer of any family has two sublayers, each with an RMSNorm before it, after it, or both:

    x = x + after(o(heads(q, k, v)))        q, k, v of before(x)        `attention_norms`
    x = x + after(down(act(gate) up))       gate, up of before(x)       `mlp_norms`

Every norm has separate gains for the added channels, which it divides by the base's RMS. So the
base keeps its bits, and the widened model is a plain one (`export/dense.py`). Only norms over one
head's channels serve added heads as is.

Shapes: B batch, T positions, D base channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .fused_scale import LLAMA_NORM, NormForm


@dataclass(frozen=True)
class Sublayer:
    """One of the two sublayers of a layer: the module that holds its linear maps, and their names."""

    owner: str
    reading: tuple[str, ...]  # these read the stream
    writing: str  # this one writes into it
    # Those of `reading` that read x, and never u.
    reading_x_alone: tuple[str, ...] = ()


ATTENTION = Sublayer("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj")
# If gate and up both read u, an MLP is of second order in u. Norms divide u by rms(x), not by its
# own, so a u that is once large would be squared in every layer (docs/results/real-base.md).
MLP = Sublayer("mlp", ("gate_proj", "up_proj"), "down_proj", reading_x_alone=("gate_proj",))
SUBLAYERS = (ATTENTION, MLP)
# The linear maps of a layer that are widened, in order, and the module that holds each.
OWNERS = {
    name: sublayer.owner for sublayer in SUBLAYERS for name in (*sublayer.reading, sublayer.writing)
}

# Keys of a configuration that hold a list with a value for each layer.
PER_LAYER_KEYS = ("layer_types",)


def linear_of(base_layer: Any, name: str) -> nn.Linear:
    """Return one of the base's linear maps."""
    linear: nn.Linear = getattr(getattr(base_layer, OWNERS[name]), name)
    return linear


@dataclass(frozen=True)
class Family:
    """How a family's decoder computes; the defaults are Llama's. A norm is given by its module's
    name, or None.
    """

    class_name: str  # of transformers' and vLLM's classes, before ForCausalLM
    # Before and after each sublayer.
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    # Of all queries together, and of all keys together.
    width_norms: tuple[str | None, str | None] = (None, None)
    head_norms: tuple[str, str] | None = None  # of each head's queries, of each head's keys
    norm_form: NormForm = LLAMA_NORM
    # The attention window in positions, the current one included; None for full attention.
    window_of: Callable[[Any], int | None] = lambda _: None
    # The layer type to pass to the decoder's rotary embedding; None if all layers share one.
    rotary_kind: Callable[[Any], str | None] = lambda _: None
    # Whether an attention rotates its queries and keys at all.
    is_rotated: Callable[[Any], bool] = lambda _: True
    # Whether its configuration requires hidden_size % num_attention_heads == 0.
    heads_divide_channels: bool = False

    def norms_around(self, sublayer: Sublayer) -> tuple[str | None, str | None]:
        """Return the norms before and after a sublayer."""
        return self.attention_norms if sublayer is ATTENTION else self.mlp_norms

    def embedding_factor(self, embedding: Any) -> Tensor | float:
        """Return the decoder's factor on embedding rows: for Gemma, the square root of the stream's
        width; else 1.
        """
        factor: Tensor | None = getattr(embedding, "embed_scale", None)
        return 1.0 if factor is None else factor.to(embedding.weight.dtype)

    def token_rows(self, base: Any) -> Tensor:
        """Return (V, D): x_0 of every token, not yet rounded to the base's dtype."""
        embedding = base.model.embed_tokens
        factor = self.embedding_factor(embedding)
        return embedding.weight if isinstance(factor, float) else embedding.weight.float() * factor


_QUERIES_KEYS = ("q_norm", "k_norm")
_NORMED_AFTER: dict[str, Any] = {
    "attention_norms": (None, "post_attention_layernorm"),
    "mlp_norms": (None, "post_feedforward_layernorm"),
}


# By `model_type`. Lambdas rather than `attrgetter`s: torch.compile must trace them.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", heads_divide_channels=True),
    "mistral": Family("Mistral", window_of=lambda attention: attention.config.sliding_window),
    "qwen2": Family("Qwen2", window_of=lambda attention: attention.sliding_window),
    "qwen3": Family(
        "Qwen3",
        window_of=lambda attention: attention.sliding_window,
        head_norms=_QUERIES_KEYS,
    ),
    "gemma3_text": Family(
        "Gemma3",
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        head_norms=_QUERIES_KEYS,
        norm_form=NormForm("eps", offset=1.0),
        window_of=lambda attention: attention.sliding_window,
        rotary_kind=lambda attention: attention.layer_type,
        heads_divide_channels=True,
    ),
    "olmo2": Family("Olmo2", **_NORMED_AFTER, width_norms=_QUERIES_KEYS),
    "olmo3": Family(
        "Olmo3",
        **_NORMED_AFTER,
        width_norms=_QUERIES_KEYS,
        window_of=lambda attention: attention.sliding_window,
        rotary_kind=lambda attention: attention.attention_type,
    ),
    "exaone4": Family(
        "Exaone4",
        **_NORMED_AFTER,
        head_norms=_QUERIES_KEYS,
        window_of=lambda attention: attention.sliding_window if attention.is_sliding else None,
        # In a model that has layers with a window, the others use no positions.
        is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
}


def family_of(config: Any) -> Family:
    return FAMILIES[config.model_type]
