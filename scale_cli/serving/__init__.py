"""Routed serving in vLLM: both heads of a plain export from one forward pass, and the router beside the KV cache."""

from __future__ import annotations

# The classes of `model/family_scale.py` that vLLM has as its own, by the module of each; transformers routes all.
FAMILIES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma3": "gemma3",
    "Exaone4": "exaone4",
    "Qwen3Moe": "qwen3_moe",
    "Phi3": "phi3",
}


def register() -> None:
    """Tell vLLM of the routed classes, by name: nothing is imported until one is asked for.

    vLLM calls this at its start (entry point group `vllm.general_plugins`), in each of its processes.
    """
    from vllm import ModelRegistry

    for family in FAMILIES:
        name = f"ScaleRouted{family}ForCausalLM"
        ModelRegistry.register_model(name, f"scale_cli.serving.vllm_plugin:{name}")
