"""What methods and languages are called where people read of them. SCALE is the name of what widens."""

from __future__ import annotations

from scale_cli.config.schema import MethodConfig
from scale_cli.report.numbers import percent

_NAMES = {
    "preserve": "SCALE-Preserve",
    "adapt": "SCALE-Adapt",
    "route": "SCALE-Route",
    "full": "full fine-tuning",
    "lora": "LoRA",
    "osf": "OSF",
    "freeze": "partial fine-tuning",
    "llama-pro": "LLaMA-Pro",
    "adept": "ADEPT",
    "elo": "ELO",
}
_LANGUAGES = {"en": "English", "ko": "Korean", "de": "German", "fr": "French", "ja": "Japanese", "zh": "Chinese"}


def method_name(variant: str) -> str:
    """Return the name of a variant."""
    return _NAMES[variant]


def method_in_words(method: MethodConfig) -> str:
    """Return the name of a method and the settings that matter most to it."""
    if method.widens:
        expansion = method.expansion
        setting = f", ratio {expansion.ratio:g}"
        for part, ratio in (("stream", expansion.hidden_ratio), ("MLP", expansion.mlp_ratio)):
            setting += "" if ratio is None else f", of the {part} {ratio:g}"
        setting += f", {expansion.init} start"
        if expansion.codes != "random":
            setting += {"spelled": ", spelled codes", "cooccurrence": ", codes by cooccurrence"}[expansion.codes]
        if method.distils:
            setting += f", distilled on replay (weight {method.distillation.weight:g})"
    else:
        setting = {
            "lora": f", rank {method.lora.rank}{' stabilised' if method.lora.rank_stabilised else ''}"
            f"{', embeddings and head whole' if method.lora.embeddings else ''}",
            "osf": f", {percent(method.osf.kept, 0)} of directions kept",
            "freeze": f", bottom {method.freeze.num_layers} layers frozen",
            "llama-pro": ", new blocks only",
            "adept": ", new blocks only, rates by importance",
            "elo": ", aligned" if method.elo.phase == "alignment" else ", first and last layer only",
        }.get(method.variant, "")
    if method.vocabulary is not None:
        learned = "" if method.vocabulary.folder else f"{method.vocabulary.new_tokens:,} "
        setting += f", {learned}new tokens"
    return method_name(method.variant) + setting


def language_name(code: str) -> str:
    """Return a language's English name, or its code."""
    return _LANGUAGES.get(code, code)
