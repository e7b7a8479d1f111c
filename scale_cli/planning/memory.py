"""The memory of one process in training, and the room that a run takes on disk."""

from __future__ import annotations

from dataclasses import dataclass

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.widened import AddedSizes, added_sizes
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import FLOAT32, Step
from scale_cli.planning.walk import ITEMSIZES, Base, walk

# As `LOGITS_AT_ONCE` and `FEWEST_ROWS` of model/routing.py, which imports torch; a test compares.
_LOGITS_AT_ONCE, _FEWEST_ROWS = {"cpu": 2**21, "cuda": 2**26}, 128


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds from the last forward to the first backward product of a step."""

    frozen: int  # weights
    trainable: int  # float32 master weights
    gradients: int  # float32; with several processes in DistributedDataParallel's buckets
    moments: int  # of the optimiser
    saved: int  # by a micro-batch for the backward pass, with weights in autocast's precision
    head: int  # logits computed at once, and what is derived from them

    @property
    def total(self) -> int:
        """The sum; allocators, libraries and data need more."""
        return sum(vars(self).values())

    @property
    def checkpoint(self) -> int:
        """What a checkpoint holds: trained parameters and moments; the base is never written."""
        return self.trainable + self.moments


def base_of(config: RunConfig, sizes: BaseSizes) -> Base:
    model = config.model
    # `auto` is float32 until a run decides it, as for `load_base`.
    return Base(sizes, ITEMSIZES.get(model.dtype, FLOAT32), model.quantisation == "int8")


def step_of(
    config: RunConfig, sizes: BaseSizes, device_type: str = "cpu", num_new: int = 0
) -> Step:
    """Return a step of a run."""
    isolates, asked = config.corpus.isolate_documents, config.train.attention
    masked = isolates and (asked == "sdpa" or (asked is None and device_type != "cuda"))
    return walk(
        base_of(config, sizes),
        config.method,
        config.train.mixed_precision,
        num_new=num_new,
        masked=masked,
    )


def memory_of(
    step: Step,
    train: TrainConfig,
    *,
    sequence_length: int,
    vocab_size: int,
    num_processes: int = 1,
    device_type: str = "cpu",
    distils: bool = False,
) -> Memory:
    """Return what one process holds.

    Logits that are kept whole exist three times in float32 when the backward pass begins: their
    log-softmax, its gradient and their own gradient. Logits in chunks exist in the precision of the
    products and, in float32, as log-probabilities. If the products are less precise, the gradient
    for the next products exists too. Distillation adds both heads' log-probabilities, and the
    base's probabilities of one sequence, all in float32.
    """
    num_tokens = train.sequences_at_once(num_processes) * sequence_length
    num_rows = max(_LOGITS_AT_ONCE[device_type] // vocab_size, _FEWEST_ROWS)
    num_rows = min(num_rows, num_tokens)
    if step.keeps_logits:
        head = num_tokens * vocab_size * 3 * FLOAT32
    elif distils:
        head = (4 * num_rows + min(num_rows, sequence_length)) * vocab_size * FLOAT32
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
    return Memory(
        frozen=step.frozen_bytes,
        trainable=trainable,
        gradients=trainable,
        moments=moments,
        saved=step.copies_bytes + num_tokens * per_token,
        head=head,
    )


def memory_of_run(
    config: RunConfig,
    sizes: BaseSizes,
    num_processes: int = 1,
    device_type: str = "cpu",
    num_new: int = 0,
) -> Memory:
    """Return what one process of a run holds."""
    return memory_of(
        step_of(config, sizes, device_type, num_new),
        config.train,
        sequence_length=config.corpus.sequence_length,
        vocab_size=sizes.vocab_size + num_new,
        num_processes=num_processes,
        device_type=device_type,
        distils=config.method.distils,
    )


def num_served(sizes: BaseSizes, method: MethodConfig, num_new: int = 0) -> int:
    """Return the parameters of the plain model that a method's run is exported as."""
    num_layers, copies = sizes.num_hidden_layers, 0
    added = AddedSizes(0, 0, 0, 0)
    if method.definition.widens:
        added = added_sizes(sizes, method.expansion)
    else:
        training = method.definition.plain_training(method.settings, num_layers)
        copies = len(training.layers) - num_layers
    width = sizes.hidden_size + added.hidden_size
    channels = sizes.intermediate_size + added.intermediate_size
    of_queries = sizes.query_size + added.num_attention_heads * sizes.head_dim
    of_keys = sizes.key_value_size + added.num_key_value_heads * sizes.head_dim
    layer = 2 * width * (of_queries + of_keys) + 3 * width * channels
    layer += width * (4 if sizes.form.normed == "both" else 2)
    layer += (of_queries + of_keys) * (sizes.qkv_bias + sizes.form.width_norms)
    layer += (of_keys if sizes.qkv_bias else 0) + (width if sizes.o_bias else 0)
    layer += (2 * channels + width) * sizes.mlp_bias + 2 * sizes.head_dim * sizes.form.head_norms
    is_tied = sizes.tie_word_embeddings and not method.definition.widens and not num_new
    rows = (sizes.vocab_size + num_new) * (1 if is_tied else 2)
    return rows * width + (num_layers + copies) * layer + width
