"""What a config says of the methods that widen nothing (`upscale/baselines.py`)."""

from __future__ import annotations

from pydantic import Field, model_validator

from scale_cli.config.values import Section

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
