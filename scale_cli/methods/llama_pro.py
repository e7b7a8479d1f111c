"""LLaMA-Pro: only copies of layers train, each right above its original (arXiv 2401.02415)."""

from __future__ import annotations

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import PlainTraining, Settings
from scale_cli.methods.plain import Plain
from scale_cli.values import Section, counted


class LlamaProConfig(Section):
    """Depth expansion: copies of layers start as the identity, and only they train."""

    num_blocks: int | None = Field(
        default=None, ge=1, le=10_000, description="copies; null: one for every four layers"
    )


class Deeper(Plain[Settings]):
    """A method that copies layers."""

    left_out = {"lr": 2.0e-4}

    def copied(self, num_layers: int, settings: Settings) -> list[int]:
        raise NotImplementedError

    def plain_training(self, settings: Settings, num_layers: int) -> PlainTraining:
        copied = self.copied(num_layers, settings)
        layers = []
        for layer in range(num_layers):
            layers += [(layer, False), (layer, True)] if layer in copied else [(layer, False)]
        return PlainTraining(layers)


class LlamaPro(Deeper[LlamaProConfig]):
    """The copies are evenly spaced."""

    name, label = "llama-pro", "LLaMA-Pro"
    colour, mark = "#7a4a1e", ("D", "◆")
    section, settings = "llama_pro", LlamaProConfig
    is_planned = True
    left_out = {"lr": 3.0e-3}  # docs/results/rivals.md

    def in_words(self, settings: LlamaProConfig) -> str:
        return ", new blocks only"

    def copied(self, num_layers: int, settings: LlamaProConfig) -> list[int]:
        return evenly_spaced(num_layers, settings.num_blocks, "method.llama_pro.num_blocks")


def evenly_spaced(num_layers: int, num_blocks: int | None, key: str) -> list[int]:
    """Return `num_blocks` evenly spaced layers; None: one in four, as in the papers. ConfigError
    names the `key`.
    """
    count = max(1, num_layers // 4) if num_blocks is None else num_blocks
    if count > num_layers:
        raise ConfigError(f"{key}: {count}, but the base has {counted(num_layers, 'layer')}")
    return [round((index + 1) * num_layers / count) - 1 for index in range(count)]
