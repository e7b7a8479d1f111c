"""LLaMA-Pro: only copies of layers train, each right above its original (arXiv 2401.02415)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import PlainTraining
from scale_cli.methods.plain import Plain
from scale_cli.values import Section, counted


class LlamaProConfig(Section):
    """Depth expansion: copies of layers start as the identity, and only they train."""

    num_blocks: int | None = Field(
        default=None, ge=1, le=10_000, description="copies; null: one for every four layers"
    )


class LlamaPro(Plain[LlamaProConfig]):
    """The copies are evenly spaced."""

    name = "llama-pro"
    label = "LLaMA-Pro"
    colour = "#7a4a1e"
    mark = ("D", "◆")
    section = "llama_pro"
    settings = LlamaProConfig
    usual_lr = 2.0e-4  # as LoRA's

    def in_words(self, settings: LlamaProConfig) -> str:
        return ", new blocks only"

    def plain_training(self, settings: LlamaProConfig, num_layers: int) -> PlainTraining:
        key = "method.llama_pro.num_blocks"
        return copies_above(evenly_spaced(num_layers, settings.num_blocks, key), num_layers)


def evenly_spaced(num_layers: int, num_blocks: int | None, key: str) -> list[int]:
    """Return `num_blocks` evenly spaced layers; None: one in four, as in the papers. ConfigError
    names the `key`.
    """
    count = max(1, num_layers // 4) if num_blocks is None else num_blocks
    if count > num_layers:
        raise ConfigError(f"{key}: {count}, but the base has {counted(num_layers, 'layer')}")
    return [round((index + 1) * num_layers / count) - 1 for index in range(count)]


def copies_above(copied: Sequence[int], num_layers: int) -> PlainTraining:
    """Return the layers of a model in which only copies train, each right above its original."""
    layers = []
    for layer in range(num_layers):
        layers.append((layer, False))
        if layer in copied:
            layers.append((layer, True))
    return PlainTraining(layers)
