"""What a routed model asks of vLLM's configuration: that its prompts are told to the router."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig


class WithPrompts(VerifyAndUpdateConfig):
    """Adds the logits processor of prompts.py, beside the user's own."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        model = vllm_config.model_config
        is_routed = bool(getattr(model.hf_config, "scale_router", None))
        is_refused = vllm_config.use_v2_model_runner or vllm_config.speculative_config
        if is_routed and not is_refused:  # else the model says why, in a line of its own
            of_user = model.logits_processors or []
            model.logits_processors = [*of_user, "scale_cli.serving.prompts:Prompts"]
