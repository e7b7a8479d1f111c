"""The sizes of a base, from its config.json, and of what widens it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from scale_cli.errors import BaseModelError
from scale_cli.methods.method import PROJECTIONS


@dataclass(frozen=True)
class Form:
    """What a family's layer computes beside its seven linear maps; `tests/planning` holds it to the real layers."""

    normed: Literal["before", "after", "both"] = "before"  # what it reads, what it writes
    head_norms: bool = False  # of each head's queries and keys
    width_norms: bool = False  # of all queries together, and of all keys
    gain: Literal["cast, times gain", "times gain, cast", "times 1 + gain, cast"] = (
        "cast, times gain"
    )
    rotates_in_float32: bool = False
    angles_by_kind: bool = False  # layers with and without a window have angles of their own
    qkv_bias: bool = False  # always; else `attention_bias` in config.json, for o too
    head_dim: int | None = None  # where config.json has none; None: hidden_size / heads
    is_tied: bool = False  # where config.json does not say


_OLMO = Form("after", width_norms=True, gain="times gain, cast", rotates_in_float32=True)
FORMS = {  # by `model_type`
    "llama": Form(),
    "mistral": Form(),
    "qwen2": Form(qkv_bias=True),
    "qwen3": Form(head_norms=True, head_dim=128),
    "gemma3_text": Form(
        "both",
        head_norms=True,
        gain="times 1 + gain, cast",
        angles_by_kind=True,
        head_dim=256,
        is_tied=True,
    ),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, angles_by_kind=True),
    "exaone4": Form("after", head_norms=True),
}


_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class BaseSizes:
    """The sizes of a plain base, under transformers' names."""

    form: Form
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    gated_by_silu: bool
    layer_types: tuple[str, ...]

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> BaseSizes:
        """Read the sizes in a config.json; BaseModelError if it is of no known family or lacks one."""
        if (form := FORMS.get(config.get("model_type", ""))) is None:
            raise BaseModelError(
                f"model.base: {name} is of the family {config.get('model_type')}, which is not "
                f"supported (supported: {', '.join(FORMS)})"
            )
        sizes: dict[str, Any] = {key: config.get(key) for key in _NUMBERS}
        num_heads = sizes["num_attention_heads"]
        sizes["num_key_value_heads"] = config.get("num_key_value_heads") or num_heads
        for key, size in sizes.items():
            if type(size) is not int or size < 1:
                raise BaseModelError(f"model.base: {name}: {key} in config.json is {size!r}")
        sizes["head_dim"] = (
            config.get("head_dim") or form.head_dim or sizes["hidden_size"] // num_heads
        )
        with_bias = bool(config.get("attention_bias"))
        return cls(
            form=form,
            **sizes,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            tie_word_embeddings=config.get("tie_word_embeddings", form.is_tied),
            qkv_bias=form.qkv_bias or with_bias,
            o_bias=with_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            gated_by_silu=config.get("hidden_act", config.get("hidden_activation")) == "silu",
            layer_types=tuple(config.get("layer_types") or ()),
        )

    @property
    def map_widths(self) -> dict[str, int]:
        """The width that each linear map of a layer writes."""
        of_keys = self.num_key_value_heads * self.head_dim
        return {
            "q_proj": self.num_attention_heads * self.head_dim,
            "k_proj": of_keys,
            "v_proj": of_keys,
            "o_proj": self.hidden_size,
            "gate_proj": self.intermediate_size,
            "up_proj": self.intermediate_size,
            "down_proj": self.hidden_size,
        }

    @property
    def biased(self) -> set[str]:
        """The names of the maps that have a bias."""
        parts = (
            (self.qkv_bias, PROJECTIONS[:3]),
            (self.o_bias, ["o_proj"]),
            (self.mlp_bias, PROJECTIONS[4:]),
        )
        return {name for is_biased, names in parts if is_biased for name in names}
