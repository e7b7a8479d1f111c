"""Whether the windows and batches that a config asks for fit its base and its processes."""

from __future__ import annotations

from typing import Any

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError


def check_context(config: RunConfig, model_config: Any) -> None:
    """Refuse windows longer than the base was made for."""
    for key, length in _lengths(config).items():
        if length > model_config.max_position_embeddings:
            raise ConfigError(f"{key}: {length}, but the base has {model_config.max_position_embeddings} positions")


def _lengths(config: RunConfig) -> dict[str, int]:
    asked = config.evaluation.continuations
    return {
        "corpus.sequence_length": config.corpus.sequence_length,
        "evaluation.sequence_length": config.evaluation.sequence_length or 0,
        "evaluation.continuations": 0 if asked is None else asked.prompt_tokens + asked.new_tokens,
    }


def context_warnings(config: RunConfig, base_config: Any) -> list[str]:
    """Return a line where windows are longer than those the base was trained on, as far as its RoPE tells."""
    rope = getattr(base_config, "rope_parameters", None) or {}
    kind, trained = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    # A llama3 base was trained on after its RoPE had been stretched; the others are stretched for serving.
    if trained is None or kind == "llama3":
        return []
    return [
        f"{key}: {length:,}, but the base was trained on {trained:,} positions, its RoPE stretched beyond ({kind})"
        for key, length in _lengths(config).items()
        if length > trained
    ]


def check_processes(sizes: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide among the processes."""
    at_once = sizes.sequences_at_once(num_processes)
    if sizes.global_batch_size % (at_once * num_processes):
        share, rest = divmod(sizes.global_batch_size, num_processes)
        remedy = f"divides {share}" if not rest else f"and processes divide it: {num_processes} processes cannot"
        raise ConfigError(
            f"train.global_batch_size {sizes.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{at_once} x {num_processes} processes; choose a train.micro_batch_size that {remedy}"
        )
    if sizes.attention == "flash_attention_2" and sizes.compile and at_once == 1:
        raise ConfigError(
            f"train.compile: flash_attention_2 cannot be compiled with one sequence a process ({num_processes} "
            "processes); take another train.attention"
        )
