"""Routed serving in vLLM: both heads of a plain export from one forward pass, and the router beside
the KV cache.
"""

from __future__ import annotations

# The families of `model/family_scale.py` that vLLM implements; with transformers, all families can
# be routed.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Exaone4")


def register() -> None:
    """Register the routed classes with vLLM, by name: none is imported until it is needed.

    vLLM calls this at its start (entry point group `vllm.general_plugins`), in each of its
    processes.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .engine_config import WithPrompts

    for family in FAMILIES:
        name = f"ScaleRouted{family}ForCausalLM"
        ModelRegistry.register_model(name, f"scale_cli.serving.vllm_plugin:{name}")
        MODELS_CONFIG_MAP[name] = WithPrompts
