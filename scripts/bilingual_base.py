"""Train a small English base that knows some Korean, from random weights: the base of the honest table.

    python -m scripts.bilingual_base FOLDER [--hidden 256] [--layers 4] [--steps 3000] [--korean 0.15] [DATA]

It has the tokenizer and, at the default sizes, the shape of DATA/ckpt-eltec. It reads English novels and the first half
of DATA/ko-mixed; the second half stays unread. FOLDER gets the random start, the run, and the base in
`run/export/plain`. After a stop or a kill, the same command continues.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scale_cli.storage.atomic import write_text
from scripts.from_scratch import write_base

SEED = 0
FIRST_HALF = 8651  # documents of ko-mixed/train, which are in random order
HEAD_DIM = 32


def shape(like: Path, hidden_size: int, num_layers: int) -> LlamaConfig:
    """Return a base's config with another width and depth, in the same proportions."""
    config = AutoConfig.from_pretrained(like)
    num_heads = hidden_size // HEAD_DIM
    return LlamaConfig(
        **{
            **config.to_dict(),
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * config.intermediate_size // config.hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // 2,
        }
    )


def settings(folder: Path, data: Path, num_steps: int, korean: float) -> dict[str, Any]:
    """Return the config of the run: full fine-tuning of random weights on both languages."""
    mixed = {
        "path": str(data / "ko-mixed/train.txt.xz"),
        "language": "ko",
        "max_documents": FIRST_HALF,
    }
    held_out = [("en-eltec", "en"), ("ko-mixed", "ko"), ("ko-petitions", "ko")]
    return {
        "output_dir": str(folder / "run"),
        "seed": SEED,
        "model": {"base": str(folder / "random")},
        "method": {"variant": "full"},
        "corpus": {
            "sequence_length": 256,
            "sources": [
                {
                    "name": "novels",
                    "path": str(data / "en-eltec/train.txt.xz"),
                    "language": "en",
                    "weight": round(1 - korean, 6),
                },
                {"name": "ko-mixed-first-half", **mixed, "weight": korean},
            ],
        },
        "train": {
            "max_steps": num_steps,
            "global_batch_size": 16,
            "micro_batch_size": 16,
            "optimiser": "muon",
            "lr": 1e-2,
            "lr_multipliers": {"embedding": 1.0},
            "warmup_steps": 100,
            "schedule": "cosine",
            "mixed_precision": "bf16",
            "compile": True,
            "save_every_steps": 250,
        },
        "evaluation": {
            "perplexity": [
                {
                    "name": name,
                    "path": str(data / name / "valid.txt.xz"),
                    "language": language,
                    "role": "retention" if language == "en" else "acquisition",
                }
                for name, language in held_out
            ],
            "mixed_precision": "bf16",
        },
    }


def main() -> None:
    """Write random weights and a config, and run it."""
    parser = argparse.ArgumentParser(
        "python -m scripts.bilingual_base", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000, help="of 4,096 tokens")
    parser.add_argument("--korean", type=float, default=0.15, help="share of the tokens")
    given = parser.parse_args()
    like = given.data / "ckpt-eltec/hf"
    if not (given.folder / "random").exists():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(shape(like, given.hidden, given.layers))
        write_base(given.folder / "random", model, AutoTokenizer.from_pretrained(like))
    config = given.folder / "base.yaml"
    write_text(
        config,
        yaml.safe_dump(
            settings(given.folder, given.data, given.steps, given.korean), sort_keys=False
        ),
    )
    sys.exit(
        subprocess.run(
            [sys.executable, "-m", "scale_cli", "run", str(config)], check=False
        ).returncode
    )


if __name__ == "__main__":
    main()
