"""Fine-tuning: every weight trains, or all but the input embedding and the bottom layers.

Source of the second form: SCALE, arXiv 2511.03270 (the bottom three layers and the input embedding stay frozen).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import Method, MethodSection, PlainTraining
from scale_cli.values import Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Full(Method[MethodSection]):
    """Everything trains."""

    name, label = "full", "full fine-tuning"
    colour, mark = "#d55e00", ("o", "●")
    takes_new_tokens = is_planned = True
    left_out = {"lr": 4.0e-4}  # docs/results/rivals.md

    def build(
        self, base: PreTrainedModel, settings: MethodSection, seed: int, new: Any = None
    ) -> PreTrainedModel:
        return base.requires_grad_(True)

    def plain_training(self, settings: MethodSection, num_layers: int) -> PlainTraining:
        layers = [(layer, True) for layer in range(num_layers)]
        return PlainTraining(layers, trains_embedding=True, trains_top=True)


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
    is_planned = True
    left_out = {"lr": 4.0e-4}  # as full fine-tuning's

    def in_words(self, settings: FreezeConfig) -> str:
        return f", bottom {settings.num_layers} layers frozen"

    def build(
        self, base: PreTrainedModel, settings: FreezeConfig, seed: int, new: Any = None
    ) -> PreTrainedModel:
        layers = base.model.layers
        training = self.plain_training(settings, len(layers))
        base.requires_grad_(True)
        # If the embeddings are tied, this freezes the head too: they are one tensor.
        base.model.embed_tokens.requires_grad_(False)
        for layer, (_, trains) in zip(layers, training.layers, strict=True):
            layer.requires_grad_(trains)
        return base

    def plain_training(self, settings: FreezeConfig, num_layers: int) -> PlainTraining:
        count = settings.num_layers
        if count > num_layers:
            raise ConfigError(
                f"method.freeze.num_layers: {count}, but the base has {num_layers} layers"
            )
        layers = [(layer, layer >= count) for layer in range(num_layers)]
        return PlainTraining(layers, trains_top=True)
