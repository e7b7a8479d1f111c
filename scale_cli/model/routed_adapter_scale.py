"""An adapter's folder in transformers: with `trust_remote_code=True` it is routed with the base that
its config.json names (`scale_router`).

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Nothing compares that base with its recorded hash, as `scale` does.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from .adapter_pair import AdapterPair, without_copies
from .script_prior import PriorByScript
from .two_streams import Router, TwoStreams


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
        **_others: Any,
    ) -> ScaleRoutedAdapter:
        router = config.scale_router
        if dtype in (None, "auto"):
            dtype = getattr(torch, router["dtype"])
        base: Any = AutoModelForCausalLM.from_pretrained(
            router["base"], revision=router["revision"], dtype=dtype, device_map=device_map
        )
        trained = PeftModel.from_pretrained(without_copies(base), str(folder))
        model = cls(AdapterPair(base, trained), Router(prior=PriorByScript.of_export(router)))
        return model.eval()
