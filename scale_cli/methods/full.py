"""Fine-tuning: every weight trains, or all but the input embedding and the bottom layers.

Source of the second form: SCALE, arXiv 2511.03270 (the bottom three layers and the input embedding stay frozen).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import Method, MethodSection
from scale_cli.values import Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Full(Method[MethodSection]):
    """Everything trains."""

    name, label = "full", "full fine-tuning"
    colour, mark = "#d55e00", ("o", "●")
    takes_new_tokens = True
    left_out = {"lr": 4.0e-4}  # docs/results/real-base.md

    def build(
        self, base: PreTrainedModel, settings: MethodSection, seed: int, new: Any = None
    ) -> PreTrainedModel:
        return base.requires_grad_(True)


class FreezeConfig(Section):
    """Full fine-tuning above some frozen layers; the input embedding is frozen too."""

    num_layers: int = Field(
        default=3, ge=0, le=10_000, description="bottom layers that stay frozen"
    )


class Freeze(Method[FreezeConfig]):
    """Everything trains except the input embedding and the bottom layers."""

    name, label = "freeze", "partial fine-tuning"
    colour, mark = "#bf5f95", ("^", "▲")
    section, settings = "freeze", FreezeConfig
    left_out = {"lr": 4.0e-4}  # as full fine-tuning's

    def in_words(self, settings: FreezeConfig) -> str:
        return f", bottom {settings.num_layers} layers frozen"

    def build(
        self, base: PreTrainedModel, settings: FreezeConfig, seed: int, new: Any = None
    ) -> PreTrainedModel:
        layers, count = base.model.layers, settings.num_layers
        if count > len(layers):
            raise ConfigError(
                f"method.freeze.num_layers: {count}, but the base has {len(layers)} layers"
            )
        base.requires_grad_(True)
        # If the embeddings are tied, this freezes the head too: they are one tensor.
        for frozen in (base.model.embed_tokens, *layers[:count]):
            frozen.requires_grad_(False)
        return base
