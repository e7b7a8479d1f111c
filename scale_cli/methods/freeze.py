"""Partial fine-tuning: all but the input embedding and the bottom layers train.

Source: SCALE, arXiv 2511.03270 (its bottom three layers stay frozen).
"""

from __future__ import annotations

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import PlainTraining
from scale_cli.methods.plain import Plain
from scale_cli.values import Section, counted


class FreezeConfig(Section):
    """Full fine-tuning above some frozen layers; the input embedding is frozen too."""

    num_layers: int = Field(
        default=3, ge=0, le=10_000, description="bottom layers that stay frozen"
    )


class Freeze(Plain[FreezeConfig]):
    """Everything trains except the input embedding and the bottom layers."""

    name = "freeze"
    label = "partial fine-tuning"
    colour = "#bf5f95"
    mark = ("^", "▲")
    section = "freeze"
    settings = FreezeConfig
    usual_lr = 1.0e-4  # as full fine-tuning's

    def in_words(self, settings: FreezeConfig) -> str:
        return f", bottom {counted(settings.num_layers, 'layer')} frozen"

    def plain_training(self, settings: FreezeConfig, num_layers: int) -> PlainTraining:
        count = settings.num_layers
        if count > num_layers:
            raise ConfigError(
                f"method.freeze.num_layers: {count}, but the base has {counted(num_layers, 'layer')}"
            )
        layers = [(layer, layer >= count) for layer in range(num_layers)]
        return PlainTraining(layers, trains_top=True)
