"""The memory of one process in training, and the room that a run takes on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.model.routing import rows_at_once
from scale_cli.planning.step import FLOAT32, StepCost, step_cost

# What a process on a CPU holds beside weights and a step's tensors, measured in runs of SmolLM2-135M
# and Gemma 3 270M (docs/planning.md): libraries and texts, and the tokenizer.
_PROCESS_BYTES = 600_000_000
_BYTES_OF_A_TOKEN = 1_400


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds from the last forward to the first backward product of a step."""

    frozen: int  # weights
    trainable: int  # float32 master weights
    gradients: int  # float32; with several processes in DistributedDataParallel's buckets
    moments: int  # of the optimiser
    saved: int  # by a micro-batch for the backward pass, with weights in autocast's precision
    head: int  # logits computed at once, what is derived from them, and a less precise head
    process: int  # libraries, tokenizer and texts, in main memory; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def checkpoint(self) -> int:
        """What a checkpoint holds: trained parameters and moments; the base is never written."""
        return self.trainable + self.moments


def cost_of_run(
    config: RunConfig, base_config: Any, device_type: str = "cpu", num_new: int = 0
) -> StepCost:
    """Return what a step of a run costs."""
    model = config.model
    asked = config.train.attention
    by_sdpa = asked == "sdpa" or (asked is None and device_type != "cuda")
    return step_cost(
        base_config,
        config.method,
        config.train.mixed_precision,
        # `auto` is float32 until a run decides it, as for `load_base`.
        dtype="float32" if model.dtype == "auto" else model.dtype,
        quantisation=model.quantisation,
        num_new=num_new,
        masked=config.corpus.isolate_documents and by_sdpa,
    )


def memory_of(
    step: StepCost,
    method: MethodConfig,
    train: TrainConfig,
    sequence_length: int,
    *,
    num_processes: int = 1,
    device_type: str = "cpu",
) -> Memory:
    """Return what one process holds.

    Logits that are kept whole exist three times in float32 when the backward pass begins: their
    log-softmax, its gradient and their own gradient. Logits in chunks exist in the precision of the
    products and, in float32, as log-probabilities. If the products are less precise, the gradient
    for the next products exists too, and a copy of the head. Distillation adds, in float32, the
    base's log-probabilities, and of one sequence its logits and both heads' probabilities, beside
    the last one's gradient.
    """
    vocab_size = step.vocab_size
    num_tokens = train.sequences_at_once(num_processes) * sequence_length
    num_rows = min(rows_at_once(device_type, vocab_size), num_tokens)
    if step.keeps_logits:
        head = num_tokens * vocab_size * 3 * FLOAT32
    elif method.distils:
        of_one = min(num_rows, sequence_length)
        of_last = min(num_rows - of_one, of_one)
        head = (2 * num_rows + 3 * of_one + of_last) * vocab_size * FLOAT32
        head += num_rows * vocab_size * (step.lowered or FLOAT32)
    else:
        of_products = 2 * step.lowered if step.lowered else FLOAT32
        head = num_rows * vocab_size * (of_products + FLOAT32)
    if not step.keeps_logits:
        head += step.lowered_head_bytes

    trainable = FLOAT32 * step.num_trainable
    moments = sum(
        FLOAT32 * size * (1 if train.optimiser == "muon" and kind == "matrix" else 2)
        for kind, size in step.trained.items()
    )
    # With the one mask of a byte that all are made from.
    of_masks = step.bytes_per_pair + (step.bytes_per_pair > 0)
    per_token = step.bytes_per_token + sequence_length * of_masks
    saved = step.copies_bytes + num_tokens * per_token
    process = _PROCESS_BYTES + vocab_size * _BYTES_OF_A_TOKEN
    return Memory(
        frozen=step.frozen_bytes,
        trainable=trainable,
        gradients=trainable,
        moments=moments,
        saved=saved,
        head=head,
        process=process if device_type == "cpu" else 0,
    )
