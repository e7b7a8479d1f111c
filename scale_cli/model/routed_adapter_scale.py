"""An adapter's folder in transformers: with `trust_remote_code=True` it is routed with the base that
its config.json names (`scale_router`).

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Nothing compares that base with its recorded hash, as `scale` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from .adapter_pair import AdapterPair, without_copies
from .script_prior import PriorByScript
from .two_streams import Router, TwoStreams

# Arguments of `from_pretrained` that say how the base is loaded.
_OF_BASE = ("quantization_config", "max_memory", "offload_folder")
_OF_HUB = ("cache_dir", "local_files_only", "token")


class ScaleRoutedAdapter(TwoStreams):
    """A base and a LoRA adapter on its weights, mixed by the router; `head` picks one of them."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder: Any,
        *_args: Any,
        config: Any,
        dtype: Any = None,
        device_map: Any = None,
        **others: Any,
    ) -> ScaleRoutedAdapter:
        router = config.scale_router
        dtype = others.get("torch_dtype") if dtype is None else dtype
        if dtype in (None, "auto"):
            dtype = getattr(torch, router["dtype"])
        given = {name: others[name] for name in (*_OF_BASE, *_OF_HUB) if name in others}
        base: Any = AutoModelForCausalLM.from_pretrained(
            router["base"],
            revision=router["revision"],
            dtype=dtype,
            device_map=device_map,
            attn_implementation=config._attn_implementation,  # None: transformers' choice
            **given,
        )
        trained = PeftModel.from_pretrained(without_copies(base), str(folder))
        model = cls(AdapterPair(base, trained), Router(prior=PriorByScript.of_export(router)))
        if (Path(folder) / GENERATION_CONFIG_NAME).is_file():  # a hub id loads the adapter alone
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model.eval()
