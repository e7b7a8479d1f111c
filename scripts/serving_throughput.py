"""Measure the cost of routing in vLLM: one plain folder of random weights, served plain and routed, in turns.

    .venv/vllm/bin/python scripts/serving_throughput.py

Prefill is the time of prompts with one new token each. Decode is the time of further tokens after short prompts, per
step of the batch. Both are processor time of the one computing thread, so that other users of the machine matter
little. Ratios are formed within turns; the table has their medians. It also has a plain model of the base's own size:
two of those are the cost of mixing the base with a fine-tuned copy of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
BATCHES = (1, 8, 32)
PROMPT, SHORT = 128, 16


def folder_of(
    root: Path, name: str, hidden: int, options: argparse.Namespace, router: dict[str, Any] | None
) -> Path:
    """Write the config of a Llama, and return its folder; weights are made up at loading."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "vocab_size": options.vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(config | ({"scale_router": router} if router else {}))
    )
    return folder


def engine_of(
    folder: Path, options: argparse.Namespace, architecture: str = "LlamaForCausalLM"
) -> Any:
    """Start an engine with random weights, and return what generates with it."""
    from vllm import LLM

    return LLM(
        str(folder),
        hf_overrides={"architectures": [architecture]},
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    ).generate


def seconds(generate: Any, batch: int, length: int, new: int) -> float:
    """Return the processor time of one call, in seconds."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [1 + (at * 7 + row) % 900 for at in range(length)]}
        for row in range(batch)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = time.process_time()
    generate(prompts, sampling, use_tqdm=False)
    return time.process_time() - began


def measured(
    engines: dict[str, Any], turns: int, new: int
) -> dict[tuple[str, int, str], list[float]]:
    """Return, for every engine and batch, the seconds of a prefill and of one decoding step in each turn."""
    took: dict[tuple[str, int, str], list[float]] = {}
    for turn in range(turns + 1):
        for batch in BATCHES:
            for name, engine in list(engines.items())[:: -1 if turn % 2 else 1]:
                prefill = seconds(engine, batch, PROMPT, 1)
                decode = (
                    seconds(engine, batch, SHORT, 1 + new) - seconds(engine, batch, SHORT, 1)
                ) / new
                for what, each in (("prefill", prefill), ("decode", decode)):
                    if turn > 0:  # the first turn compiles
                        took.setdefault((name, batch, what), []).append(each)
    return took


def times(numerator: list[float], denominator: list[float], factor: int = 1) -> str:
    """Return the median of the ratios within turns."""
    return f"{factor * statistics.median(a / b for a, b in zip(numerator, denominator, strict=True)):.2f}x"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024, help="channels of the base's stream")
    parser.add_argument("--expansion", type=int, default=256, help="channels of the added one")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="tokens of a decode")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    router = {
        "stream_sizes": [options.hidden, options.expansion],
        "prior": 0.5,
    }
    with tempfile.TemporaryDirectory() as root:
        folder = folder_of(
            Path(root), "widened", options.hidden + options.expansion, options, router
        )
        engines = {
            "base": engine_of(
                folder_of(Path(root), "base", options.hidden, options, None), options
            ),
            "plain": engine_of(folder, options),
            "routed": engine_of(folder, options, "ScaleRoutedLlamaForCausalLM"),
        }
        took = measured(engines, options.turns, options.new)
    print(
        "| | batch | base's size, tokens/s | plain | routed | of plain | two plain in turn | two of base's size |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for what in ("prefill", "decode"):
        for batch in BATCHES:
            base, plain, routed = (took[name, batch, what] for name in ("base", "plain", "routed"))
            tokens = batch * (PROMPT if what == "prefill" else 1)
            rates = " | ".join(
                f"{tokens / statistics.median(each):.1f}" for each in (base, plain, routed)
            )
            gains = f"{times(plain, routed)} | {times(plain, routed, 2)} | {times(base, routed, 2)}"
            print(f"| {what} | {batch} | {rates} | {gains} |")


if __name__ == "__main__":
    main()
