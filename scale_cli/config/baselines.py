"""What a config says of the methods that widen nothing (`upscale/baselines.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from scale_cli.config.values import Section, Steps

_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters beside frozen projections (PEFT)."""

    rank: int = Field(default=16, ge=1, le=2**16, description="of A and B")
    alpha: int = Field(default=32, ge=1, le=2**20, description="the adapters' output is scaled by alpha / rank")
    rank_stabilised: bool = Field(default=False, description="the output is scaled by alpha / sqrt(rank) instead")
    targets: list[str] = Field(default=_PROJECTIONS, min_length=1, description="projections that get adapters")
    embeddings: bool = Field(
        default=False, description="token embedding and vocabulary head train too, whole, beside the adapters"
    )

    @model_validator(mode="after")
    def _adapted_or_whole(self) -> LoraConfig:
        if self.embeddings and (twice := sorted({"embed_tokens", "lm_head"}.intersection(self.targets))):
            raise ValueError(f"targets: {twice[0]} is there, and trains whole where embeddings is true")
        return self


class OsfConfig(Section):
    """Fine-tuning outside each matrix's largest singular directions, which stay as they are (PEFT)."""

    kept: float = Field(default=0.5, gt=0.0, lt=1.0, description="share of a matrix's directions that stay")
    targets: list[str] = Field(default=_PROJECTIONS, min_length=1, description="projections whose matrices train")


class FreezeConfig(Section):
    """Full fine-tuning above some frozen layers; the input embedding is frozen too."""

    num_layers: int = Field(default=3, ge=0, le=10_000, description="bottom layers that stay frozen")


class LlamaProConfig(Section):
    """Depth expansion: copied layers that start as the identity, and alone train."""

    num_blocks: int | None = Field(default=None, ge=1, le=10_000, description="copies; null: one for every four layers")


class AdeptConfig(Section):
    """Depth expansion where it hurts least, at rates by what the copies' tensors matter to what the base knows."""

    num_blocks: int | None = Field(default=None, ge=1, le=10_000, description="copies; null: one for every four layers")
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="that are copied, from 0; null: those whose bypass hurts least on known text, found by upscale",
    )
    probe_windows: int = Field(
        default=16, ge=1, le=10_000, description="known text measured on: windows of each source of the role replay"
    )
    every_steps: Steps = Field(default=500, description="from one measurement of the rates to the next")

    @model_validator(mode="after")
    def _layers_are_distinct(self) -> AdeptConfig:
        if self.layers is not None and (len(set(self.layers)) < len(self.layers) or min(self.layers) < 0):
            raise ValueError("layers: names a layer twice, or one below 0")
        if self.layers is not None and self.num_blocks not in (None, len(self.layers)):
            raise ValueError(f"num_blocks: {self.num_blocks}, but layers names {len(self.layers)}")
        return self


class EloConfig(Section):
    """First and last layer trained by themselves, then all of the model for a short while: two runs."""

    phase: Literal["layers", "alignment"] = Field(
        default="layers",
        description="layers: the first and the last layer, over none in between; alignment: everything, with "
        "train.init_from the run of the layers",
    )
