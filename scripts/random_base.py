"""Write a random base as wide as Llama-3.2-1B, and synthetic text for it: for tests at that size without the hub.

    python -m scripts.random_base FOLDER [--layers 16] [--hidden 2048] [--vocabulary 128256]

FOLDER gets `base/` and `text/{english,korean}-{train,valid}.txt`. Source of the sizes: Llama-3.2-1B's config.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.demo import write_biographies
from scripts.from_scratch import train_tokenizer, write_base

SEED = 0
TOKENS_LEARNED = 8192  # of the vocabulary; only its number of rows matters here


def reference_config(layers: int, hidden: int, vocabulary: int) -> LlamaConfig:
    """Return the shape of Llama-3.2-1B, or one with other layers, channels and tokens in the same proportions."""
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        intermediate_size=4 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )


def main() -> None:
    """Write the base and its text."""
    parser = argparse.ArgumentParser(
        "python -m scripts.random_base", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    given = parser.parse_args()
    texts = write_biographies(given.folder / "text", SEED)
    tokenizer = train_tokenizer(
        [*texts["english-train"], *texts["korean-train"]], min(TOKENS_LEARNED, given.vocabulary)
    )
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(reference_config(given.layers, given.hidden, given.vocabulary))
    write_base(given.folder / "base", model, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {given.folder / 'base'}")


if __name__ == "__main__":
    main()
