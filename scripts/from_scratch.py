"""Train a small base model: a tokenizer, and a Llama from random weights, for demos and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import trange
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.methods.recipes import Hook, Training, make_hooks
from scale_cli.storage.atomic import new_folder
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import train_step
from scale_cli.upscale.building import MethodModel

END_OF_TEXT = "<|end_of_text|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer trained on texts; END_OF_TEXT closes every document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def train_base(
    architecture: LlamaConfig,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    train: TrainConfig,
    seed: int,
    folder: Path,
) -> LlamaForCausalLM:
    """Train every weight of a Llama from a random start, and write it with its tokenizer."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(architecture)
    for _ in training_steps(model, batches, train, "training a base"):
        pass
    write_base(folder, model, tokenizer)
    return model.eval()


def training_steps(
    model: MethodModel,
    batches: Batches,
    train: TrainConfig,
    description: str,  # of the bar
    config: Any = None,  # of hooks: `method`, `seed` and the roles of the `corpus`
) -> Iterator[int]:
    """Train a model's trainable parameters in one process; yield 0, and then the number of steps after each step.

    Between two steps the model may be used in evaluation mode.
    """
    accelerator = Accelerator(mixed_precision="no")  # the step sets autocast
    wrapped = accelerator.prepare(for_training(model.to(accelerator.device), train))
    optimiser = build_optimiser(model, train)
    hooks: list[Hook] = []
    if config is not None:
        parts = Training(
            config=config, model=model, wrapped=wrapped, accelerator=accelerator, batches=batches
        )
        hooks = make_hooks(parts)
    yield 0
    with trange(train.max_steps, desc=description, unit="step", leave=False) as steps:
        for step in steps:
            batch = batches.of_step(step)
            wrapped.train()
            result = train_step(accelerator, wrapped, optimiser, batch, train, hooks=hooks).result()
            steps.set_postfix_str(f"loss {result.loss:.4f}", refresh=False)
            yield step + 1


def write_base(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model and its tokenizer as a local base model."""
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
