"""Measure the cost of routing in vLLM: one plain folder of random weights, served plain and routed, in turns.

    .venv/vllm/bin/python -m scripts.serving_throughput

Time is measured as `engine_speed.py` says. The table also has a plain model of the base's own size: two of those are
the cost of mixing the base with a fine-tuned copy of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from scripts.engine_speed import ENGINE, Served, measured, one_thread, show


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
) -> Served:
    """Start an engine with random weights."""
    from vllm import LLM

    engine = LLM(
        str(folder),
        hf_overrides={"architectures": [architecture]},
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=512,
        **ENGINE,
    )
    return Served(engine)


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
    one_thread()
    router = {
        "stream_sizes": [options.hidden, options.expansion],
        "prior": 0.5,
    }
    with tempfile.TemporaryDirectory() as root:
        folder = folder_of(
            Path(root), "widened", options.hidden + options.expansion, options, router
        )
        served = {
            "base": engine_of(
                folder_of(Path(root), "base", options.hidden, options, None), options
            ),
            "plain": engine_of(folder, options),
            "routed": engine_of(folder, options, "ScaleRoutedLlamaForCausalLM"),
        }
        took = measured(served, options.turns, options.new)
    show(
        took,
        [*served],
        [
            ("of plain", "plain", "routed", 1),
            ("two plain in turn", "plain", "routed", 2),
            ("two of base's size", "base", "routed", 2),
        ],
    )


if __name__ == "__main__":
    main()
