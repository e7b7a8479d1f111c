"""Routed serving in vLLM: both heads of a plain export from one forward pass, and the router beside the KV cache."""

from __future__ import annotations

# The classes of `model/family_scale.py` that vLLM has as its own; transformers routes all.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Exaone4", "Qwen3Moe", "Phi3")


def register() -> None:
    """Tell vLLM of the routed classes, by name: nothing is imported until one is asked for.

    vLLM calls this at its start (entry point group `vllm.general_plugins`), in each of its processes.
    """
    from vllm import ModelRegistry

    for family in FAMILIES:
        name = f"ScaleRouted{family}ForCausalLM"
        ModelRegistry.register_model(name, f"scale_cli.serving.vllm_plugin:{name}")
