"""The configuration of a widened model: the base's configuration and the sizes of the expansion."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import transformers

# Checked here because transformers reads this file of an export first, and an older one lacks names
# imported below.
LEAST_TRANSFORMERS = (5, 20)  # as pyproject says
if tuple(map(int, transformers.__version__.split(".")[:2])) < LEAST_TRANSFORMERS:
    raise ImportError(
        f"a widened model needs transformers {'.'.join(map(str, LEAST_TRANSFORMERS))} or newer; "
        f"installed is {transformers.__version__}"
    )

from transformers import PreTrainedConfig  # noqa: E402 (an old transformers fails here)

# Fields that generation and evaluation tools read; a widened model copies them from its base.
_READ_FROM_BASE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class ScaleConfig(PreTrainedConfig):
    """Sizes of the expansion, the layers where it collaborates, and how its head is served beside
    the base's.
    """

    model_type = "scale"

    base_config: dict[str, Any] = field(default_factory=dict)  # `model_type` included
    variant: str = "preserve"  # preserve | adapt | route
    expansion_hidden_size: int = 0  # channels of the expansion stream (d')
    expansion_intermediate_size: int = 0  # MLP channels added
    expansion_num_attention_heads: int = 0  # query heads added, of the base's head_dim
    expansion_num_key_value_heads: int = 0  # added at the base's query to key/value ratio
    # Layers whose attention has W12 blocks, and layers whose MLP has them.
    attention_collaboration_layers: list[int] = field(default_factory=list)
    mlp_collaboration_layers: list[int] = field(default_factory=list)
    # How the added blocks began: the `name` of the start, and what its rates follow.
    start: dict[str, Any] = field(default_factory=dict)
    # posterior | cosine; None: no router was asked for. Where the trained head serves, it is for `--head routed`.
    router_rule: str | None = "posterior"
    router_prior: float = 0.5  # weight of the base head at the first token
    router_threshold: float = 0.5  # tau of the cosine rule
    # Of the base head when a prompt is in the run's new script, and that script's code points, as
    # first and last of each range. `scale` computes a prompt's prior from them. No script: never.
    router_script_prior: float | None = None
    router_script: list[list[int]] = field(default_factory=list)
    # For each token that the base lacks: the old ids that stand for it, separated by spaces.
    new_tokens: list[str] = field(default_factory=list)
    # The first ids of those that only ever begin text in the new tokens' script.
    own_pieces: list[int] = field(default_factory=list)
    use_cache: bool = True  # whether generation keeps keys, values and the router's state

    def __post_init__(self, **given: Any) -> None:
        given |= {name: self.base_config.get(name) for name in _READ_FROM_BASE}
        if self.new_tokens:
            given["vocab_size"] += len(self.new_tokens)
        # The base's own configuration says whether its embeddings are tied; E' and H' never are.
        super().__post_init__(**given | {"tie_word_embeddings": False})

    @property
    def routes(self) -> bool:
        """Whether serving mixes the base's head and the trained one."""
        by_variant = {"preserve": False, "adapt": False, "route": True}[self.variant]
        return by_variant and self.router_rule is not None

    @property
    def first_collaborating_layer(self) -> int:
        """The lowest layer that writes into the base stream; num_hidden_layers if none does."""
        layers = [*self.attention_collaboration_layers, *self.mlp_collaboration_layers]
        return min(layers, default=int(self.base_config.get("num_hidden_layers", 0)))
