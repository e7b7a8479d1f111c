"""Measure the cost of routing LoRA in vLLM: one export, its base, vLLM's own LoRA serving and the router, in turns.

    .venv/vllm/bin/python -m scripts.adapter_throughput runs/lora/export/adapter

Time is measured as in `serving_throughput.py`. The last two columns say how much of the plain base's speed, and of that
of vLLM's own LoRA, is kept with the router.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from scripts.serving_throughput import BATCHES, ENVIRONMENT, PROMPT, measured, times


def generators(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine for each way to serve, and return what generates with it."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "adapter_config.json").read_text())
    base = config["scale_router"]["base"]
    routed = {"architectures": [f"ScaleRouted{config['architectures'][0]}"]}
    own = LLM(base, enable_lora=True, max_lora_rank=settings["r"], **options)
    return {
        "base": LLM(base, **options).generate,
        "LoRA": partial(own.generate, lora_request=LoRARequest("adapter", 1, str(folder))),
        "routed": LLM(str(folder), hf_overrides=routed, **options).generate,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="LoRA's export")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new", type=int, default=16, help="tokens of a decode")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    engine = {
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    }
    took = measured(generators(options.folder, engine), options.turns, options.new)
    print("| | batch | base, tokens/s | LoRA | routed | of the base | of LoRA |")
    print("|---|---|---|---|---|---|---|")
    for what in ("prefill", "decode"):
        for batch in BATCHES:
            base, lora, routed = (took[name, batch, what] for name in ("base", "LoRA", "routed"))
            tokens = batch * (PROMPT if what == "prefill" else 1)
            rates = " | ".join(
                f"{tokens / statistics.median(each):.1f}" for each in (base, lora, routed)
            )
            print(f"| {what} | {batch} | {rates} | {times(base, routed)} | {times(lora, routed)} |")


if __name__ == "__main__":
    main()
