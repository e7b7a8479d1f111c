"""Routed serving in vLLM: both heads of a plain export from one forward pass, and the router beside
the KV cache.
"""

from __future__ import annotations

from typing import Any

# The families of `model/family_scale.py` that vLLM implements; with transformers, all families can
# be routed.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Exaone4")


def register() -> None:
    """Register the routed classes with vLLM, by name: none is imported until it is needed.

    vLLM calls this at its start (entry point group `vllm.general_plugins`), in each of its
    processes.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class WithPrompts(VerifyAndUpdateConfig):
        """Have vLLM tell the router of every request's prompt."""

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            model = vllm_config.model_config
            is_routed = bool(getattr(model.hf_config, "scale_router", None))
            is_refused = vllm_config.use_v2_model_runner or vllm_config.speculative_config
            if is_routed and not is_refused:  # else the model says why, in a line of its own
                of_user = model.logits_processors or []
                model.logits_processors = [*of_user, "scale_cli.serving.prompts:Prompts"]

    for family in FAMILIES:
        name = f"ScaleRouted{family}ForCausalLM"
        ModelRegistry.register_model(name, f"scale_cli.serving.vllm_plugin:{name}")
        MODELS_CONFIG_MAP[name] = WithPrompts
