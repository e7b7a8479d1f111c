"""The measured shapes, by name: a random Llama, a batch, a precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scale_cli.config.schema import Dtype
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches, PackedWindows

# More steps than any run takes; batches are drawn, not stored.
_NUM_STEPS = 10_000


@dataclass(frozen=True)
class Shape:
    """A model, a batch and a precision."""

    name: str  # its name on the command line
    sizes: dict[str, Any]  # of the Llama, by transformers' names
    batch_size: int  # sequences per step, all in one micro-batch
    sequence_length: int  # tokens per sequence
    dtype: Dtype = "float32"  # of the frozen base
    mixed_precision: Literal["no", "bf16"] = "no"  # autocast of the step
    device: str = "cpu"  # cpu or cuda

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def top_layers(self) -> int:
        """The number of layers in the top quarter: rounded down, and at least one."""
        return max(1, int(self.sizes["num_hidden_layers"]) // 4)

    def train(self) -> TrainConfig:
        return TrainConfig(
            max_steps=_NUM_STEPS,
            global_batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
            lr=1e-4,
            schedule="constant",
            mixed_precision=self.mixed_precision,
        )

    def llama_config(self) -> LlamaConfig:
        return LlamaConfig(**self.sizes)

    def base(self, seed: int) -> LlamaForCausalLM:
        """Return the random base, frozen, on its device and in its dtype."""
        torch.manual_seed(seed)
        with torch.device(self.device):  # a processor takes 10 s for a billion random numbers
            model: Any = LlamaForCausalLM(self.llama_config())
        return model.to(getattr(torch, self.dtype)).requires_grad_(False).eval()

    def batches(self, folder: Path, seed: int) -> Batches:
        """Return batches of random tokens, read from a file like a corpus."""
        path = folder / f"{self.name}.npy"
        num_ids = 512 * self.num_tokens + 1
        ids = np.random.default_rng(seed).integers(
            0, self.sizes["vocab_size"], num_ids, dtype=np.uint32
        )
        np.save(path, ids, allow_pickle=False)
        return Batches(
            [PackedWindows(np.load(path, mmap_mode="r", allow_pickle=False), self.sequence_length)],
            [1.0],
            num_steps=_NUM_STEPS,
            seed=seed,
            global_batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
        )


def _llama(
    layers: int, hidden: int, intermediate: int, heads: int, key_value_heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": None,
    }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", _llama(2, 64, 128, 8, 8, 256), batch_size=2, sequence_length=32),
        Shape(  # bfloat16 with float32 master weights, as usual in training
            "cpu",
            _llama(6, 512, 2048, 8, 8, 8192),
            batch_size=4,
            sequence_length=512,
            dtype="bfloat16",
            mixed_precision="bf16",
        ),
        Shape("cpu-fp32", _llama(6, 512, 2048, 8, 8, 8192), batch_size=4, sequence_length=512),
        Shape(  # SmolLM2-135M
            "cpu-135m",
            {**_llama(30, 576, 1536, 9, 3, 49_152), "tie_word_embeddings": True},
            batch_size=4,
            sequence_length=256,
        ),
        Shape(  # Gemma 3 270M: 262,144 tokens, wide heads
            "cpu-270m",
            {**_llama(18, 640, 2048, 4, 1, 262_144), "head_dim": 256, "tie_word_embeddings": True},
            batch_size=4,
            sequence_length=256,
        ),
        Shape(  # Llama-3.2-1B
            "gpu",
            {
                **_llama(16, 2048, 8192, 32, 8, 128_256),
                "tie_word_embeddings": True,
                "rope_theta": 500_000.0,
            },
            batch_size=4,
            sequence_length=2048,
            dtype="bfloat16",
            mixed_precision="bf16",
            device="cuda",
        ),
        Shape(  # SmolLM2-135M
            "gpu-135m",
            {**_llama(30, 576, 1536, 9, 3, 49_152), "tie_word_embeddings": True},
            batch_size=16,
            sequence_length=1024,
            dtype="bfloat16",
            mixed_precision="bf16",
            device="cuda",
        ),
    )
}
