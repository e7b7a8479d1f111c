"""The memory of one process in training, and the room that a run takes on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.widened import added_sizes
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import FLOAT32, Step, Weights
from scale_cli.planning.walk import ITEMSIZES, walk

# As `LOGITS_AT_ONCE` and `FEWEST_ROWS` of model/routing.py, which imports torch; a test compares.
_LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
_FEWEST_ROWS = 128
# What a process on a CPU holds beside weights and a step's tensors, measured in runs of SmolLM2-135M
# and Gemma 3 270M (docs/planning.md): libraries and texts, and the tokenizer.
_PROCESS_BYTES = 500_000_000
_BYTES_OF_A_TOKEN = 1_400


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds from the last forward to the first backward product of a step."""

    frozen: int  # weights
    trainable: int  # float32 master weights
    gradients: int  # float32; with several processes in DistributedDataParallel's buckets
    moments: int  # of the optimiser
    saved: int  # by a micro-batch for the backward pass, with weights in autocast's precision
    head: int  # logits computed at once, and what is derived from them
    process: int  # libraries, tokenizer and texts, in main memory; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def checkpoint(self) -> int:
        """What a checkpoint holds: trained parameters and moments; the base is never written."""
        return self.trainable + self.moments


def step_of(
    config: RunConfig, sizes: BaseSizes, device_type: str = "cpu", num_new: int = 0
) -> Step:
    """Return a step of a run."""
    model = config.model
    asked = config.train.attention
    by_sdpa = asked == "sdpa" or (asked is None and device_type != "cuda")
    # `auto` is float32 until a run decides it, as for `load_base`.
    base = Weights(ITEMSIZES.get(model.dtype, FLOAT32), in_8_bits=model.quantisation == "int8")
    return walk(
        sizes,
        config.method,
        config.train.mixed_precision,
        base=base,
        num_new=num_new,
        masked=config.corpus.isolate_documents and by_sdpa,
    )


def rows_at_once(device_type: str, vocab_size: int) -> int:
    """Return of how many tokens the logits exist at once."""
    return max(_LOGITS_AT_ONCE[device_type] // vocab_size, _FEWEST_ROWS)


def memory_of(
    step: Step,
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
    for the next products exists too. Distillation adds, in float32, the base's log-probabilities,
    and of one sequence its logits and both heads' probabilities, beside the last one's gradient.
    """
    vocab_size = step.sizes.vocab_size + step.num_new
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

    trainable = FLOAT32 * step.num_trainable
    moments = sum(
        FLOAT32 * size * (1 if train.optimiser == "muon" and kind == "matrix" else 2)
        for kind, size in step.trained.items()
    )
    of_masks = step.bytes_per_pair + step.masked  # and the one mask that all are made from
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


def num_served(sizes: BaseSizes, method: MethodConfig, num_new: int = 0) -> int:
    """Return the parameters of the plain model that a method's run is exported as."""
    if method.definition.widens:
        added = vars(added_sizes(sizes, method.expansion))
        widths = {name: getattr(sizes, name) + size for name, size in added.items()}
        served = replace(sizes, **widths, tie_word_embeddings=False)
    else:
        training = method.definition.plain_training(method.settings, sizes.num_hidden_layers)
        served = replace(sizes, num_hidden_layers=len(training.layers))
    return walk(served, MethodConfig(variant="full"), num_new=num_new).num_trainable
