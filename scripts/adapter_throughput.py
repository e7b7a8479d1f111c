"""Measure the cost of routing LoRA in vLLM: one export, its base, vLLM's own LoRA serving and the router, in turns.

    .venv/vllm/bin/python -m scripts.adapter_throughput runs/lora/export/adapter

Time is measured as `engine_speed.py` says. The last two columns say how much of the plain base's speed, and of that of
vLLM's own LoRA, is kept with the router.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts.engine_speed import ENGINE, Served, measured, one_thread, show


def engines(folder: Path, dtype: str) -> dict[str, Served]:
    """Start an engine for each way to serve."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "adapter_config.json").read_text())
    base = config["scale_router"]["base"]
    options: dict[str, Any] = {
        **ENGINE,
        "dtype": dtype,
        "max_model_len": 256,
        "num_gpu_blocks_override": 64,
    }
    routed = {"architectures": [f"ScaleRouted{config['architectures'][0]}"]}
    own = LLM(base, enable_lora=True, max_loras=1, max_lora_rank=settings["r"], **options)
    return {
        "base": Served(LLM(base, **options)),
        "LoRA": Served(own, {"lora_request": LoRARequest("adapter", 1, str(folder))}),
        "routed": Served(LLM(str(folder), hf_overrides=routed, **options)),
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
    one_thread()
    served = engines(options.folder, options.dtype)
    took = measured(served, options.turns, options.new, prefills=(1, 8))
    show(took, [*served], [(f"of {name}", name, "routed", 1) for name in ("base", "LoRA")])


if __name__ == "__main__":
    main()
