"""LLaMA-Pro: only copies of layers train, each right above its original (arXiv 2401.02415).

A copy's o_proj and down_proj, or the gains of the norms after them, are 0 at the start, so that it adds nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pydantic import Field

from scale_cli.errors import ConfigError
from scale_cli.methods.method import Method, PlainTraining, Settings
from scale_cli.values import Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LlamaProConfig(Section):
    """Depth expansion: copies of layers start as the identity, and only they train."""

    num_blocks: int | None = Field(
        default=None, ge=1, le=10_000, description="copies; null: one for every four layers"
    )


class Deeper(Method[Settings]):
    """A method that copies layers."""

    left_out = {"lr": 2.0e-4}

    def copied(self, num_layers: int, settings: Settings) -> list[int]:
        raise NotImplementedError

    def build(
        self, base: PreTrainedModel, settings: Settings, seed: int, new: Any = None
    ) -> PreTrainedModel:
        num_layers = base.config.num_hidden_layers
        return deepen(base, order_of(num_layers, self.copied(num_layers, settings)))


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

    def plain_training(self, settings: LlamaProConfig, num_layers: int) -> PlainTraining:
        return PlainTraining(order_of(num_layers, self.copied(num_layers, settings)))


def evenly_spaced(num_layers: int, num_blocks: int | None, key: str) -> list[int]:
    """Return `num_blocks` evenly spaced layers; None: one in four, as in the papers. ConfigError names the `key`."""
    count = max(1, num_layers // 4) if num_blocks is None else num_blocks
    if count > num_layers:
        raise ConfigError(f"{key}: {count}, but the base has {num_layers} layers")
    return [round((index + 1) * num_layers / count) - 1 for index in range(count)]


def order_of(num_layers: int, copied: Collection[int]) -> list[tuple[int, bool]]:
    """Return the layers of a deeper model, bottom up: which base layer each comes from, and whether it is a copy."""
    return [
        (layer, added)
        for layer in range(num_layers)
        for added in ([False, True] if layer in copied else [False])
    ]


def deepen(base: PreTrainedModel, order: list[tuple[int, bool]]) -> PreTrainedModel:
    """Return a model with a base's layers in the given order; the copies add nothing yet, and only they train."""
    from transformers import AutoModelForCausalLM

    from scale_cli.model.family_scale import family_of

    family = family_of(base.config)
    sizes: dict[str, Any] = {"num_hidden_layers": len(order)}
    if kinds := getattr(base.config, "layer_types", None):
        sizes["layer_types"] = [kinds[source] for source, _ in order]
    config = type(base.config).from_dict({**base.config.to_dict(), **sizes})
    deeper: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
    weights = base.state_dict()
    tensors = {
        name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")
    }
    for place, (source, _) in enumerate(order):
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                tensors[f"model.layers.{place}.{name.removeprefix(prefix)}"] = tensor
    deeper.load_state_dict(tensors, strict=True)
    deeper.generation_config = base.generation_config
    deeper.requires_grad_(False)
    for layer, (_, added) in zip(deeper.model.layers, order, strict=True):
        if added:
            family.silence(layer)
        layer.requires_grad_(added)
    return deeper
