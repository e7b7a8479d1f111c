"""LoRA: low-rank A and B beside frozen projections train, by PEFT; B = 0 at the start (arXiv
2106.09685).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from scale_cli.errors import ConfigError, require
from scale_cli.methods.method import PROJECTIONS, Method
from scale_cli.methods.stream_kinds import ADAPTER
from scale_cli.values import Section

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class LoraConfig(Section):
    """Low-rank adapters beside frozen projections (PEFT)."""

    rank: int = Field(default=16, ge=1, le=2**16, description="rank of A and B")
    alpha: int = Field(
        default=32, ge=1, le=2**20, description="the adapters' output is scaled by alpha / rank"
    )
    rank_stabilised: bool = Field(
        default=False, description="the output is scaled by alpha / sqrt(rank) instead"
    )
    targets: list[str] = Field(
        default=[*PROJECTIONS], min_length=1, description="projections that get adapters"
    )
    embeddings: bool = Field(
        default=False,
        description="token embedding and vocabulary head train too, as whole matrices",
    )

    @model_validator(mode="after")
    def _adapted_or_whole(self) -> LoraConfig:
        if self.embeddings and (
            twice := sorted({"embed_tokens", "lm_head"}.intersection(self.targets))
        ):
            raise ValueError(
                f"targets: contains {twice[0]}, but embeddings: true trains it as a whole matrix; remove one of the two"
            )
        return self


def put_beside(base: PreTrainedModel, settings: Any, key: str) -> PeftModel:
    """Put PEFT's modules beside a base's, by PEFT's settings; ConfigError names the config's `key`."""
    import warnings

    from peft import get_peft_model

    targets = sorted(settings.target_modules)
    names = [f".{name}" for name, _ in base.named_modules()]  # a target is the end of one
    if absent := [of for of in targets if not any(name.endswith(f".{of}") for name in names)]:
        known = ", ".join((*PROJECTIONS, "embed_tokens", "lm_head"))
        raise ConfigError(f"{key}: the base has no {', '.join(absent)}; it has {known}")
    # Nothing is ever merged into a quantised base: an export stands on a dequantised one.
    warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated")
    try:
        return get_peft_model(base, settings)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


class Lora(Method[LoraConfig]):
    """Adapters train."""

    name = "lora"
    label = "LoRA"
    colour = "#d99000"
    mark = ("s", "■")
    section = "lora"
    settings = LoraConfig
    usual_lr = 2.0e-4  # the lowest that was best on a base (docs/results/rates.md)
    streams = ADAPTER
    exports = ("adapter",)  # merged in 16 bits it would lose what a short run learned

    def in_words(self, settings: LoraConfig) -> str:
        stabilised = " stabilised" if settings.rank_stabilised else ""
        return f", rank {settings.rank}{stabilised}{', embeddings and head whole' if settings.embeddings else ''}"

    def trains_base_weights(self, settings: LoraConfig) -> bool:
        return settings.embeddings

    def highest_lr(self, settings: LoraConfig) -> float:
        # B A is scaled by alpha / divisor.
        divisor = math.sqrt(settings.rank) if settings.rank_stabilised else settings.rank
        return 2.0e-2 * divisor / settings.alpha

    def build(
        self, base: PreTrainedModel, settings: LoraConfig, seed: int, new: Any = None
    ) -> PeftModel:
        require("peft", "method.variant lora")
        import torch
        from peft import LoraConfig as PeftLora

        peft = PeftLora(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            use_rslora=settings.rank_stabilised,
            target_modules=list(settings.targets),
            lora_dropout=0.0,
            modules_to_save=["embed_tokens", "lm_head"] if settings.embeddings else None,
            ensure_weight_tying=settings.embeddings and base.config.tie_word_embeddings,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return put_beside(base, peft, "method.lora.targets")
