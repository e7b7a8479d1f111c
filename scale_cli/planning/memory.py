"""What one process holds in training, by kind, and what it writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import recipes_of
from scale_cli.model.routing import rows_at_once
from scale_cli.planning.counting import SavedTensors, count_saved_tensors, model_without_weights
from scale_cli.upscale.method import MethodModel, kinds_of_parameters, moments_of
from scale_cli.upscale.objective import attends_by_mask


@dataclass(frozen=True)
class Parameters:
    """How many parameters there are (a tied one counts once), and their bytes."""

    num_frozen: int  # that no optimiser moves
    num_trainable: int  # that one does
    # in the dtype they are held in; of OSF's parts of them, and of the start that what trains may decay to
    frozen_bytes: int
    trainable_bytes: int  # of the float32 master copy
    # what the optimiser keeps of it: AdamW two moments, Muon a momentum of each matrix; the average and
    # lookahead's slow weights where they are asked for
    moments_bytes: int

    @classmethod
    def of(cls, model: MethodModel, train: TrainConfig) -> Parameters:
        """Count them in a model whose trainability is decided."""
        parameters, kinds = dict(model.named_parameters()), kinds_of_parameters(model)
        frozen = [parameter for name, parameter in parameters.items() if name not in kinds]
        trainable = [parameters[name] for name in kinds]
        parts = [buffer for name, buffer in model.named_buffers() if "_osf_" in name]
        trainable_bytes = sum(parameter.nbytes for parameter in trainable)
        recipes = recipes_of(train)
        beside = sum(recipe.copies_kept for recipe in recipes)
        of_start = sum(recipe.copies_of_start for recipe in recipes)
        moments = [
            parameters[name].nbytes * (len(moments_of(kind, train.optimiser)) + beside) for name, kind in kinds.items()
        ]
        return cls(
            num_frozen=sum(parameter.numel() for parameter in frozen),
            num_trainable=sum(parameter.numel() for parameter in trainable),
            frozen_bytes=sum(tensor.nbytes for tensor in [*frozen, *parts]) + of_start * trainable_bytes,
            trainable_bytes=trainable_bytes,
            moments_bytes=sum(moments),
        )

    @property
    def checkpoint_bytes(self) -> int:
        """What trains, and the optimiser's moments of it; the base is never written."""
        return self.trainable_bytes + self.moments_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds from the last forward to the first backward product of a step."""

    # weights that do not train, and OSF's parts of them; with `train.decay_to_base` the start of those that do
    frozen: int
    trainable: int  # float32 master weights
    gradients: int  # float32; with several processes they lie in DistributedDataParallel's buckets
    moments: int  # the optimiser's, the average, lookahead's slow weights
    saved: int  # what a micro-batch keeps for the backward pass, weights in autocast's precision included
    head: int  # logits at once, and what becomes of them

    @property
    def total(self) -> int:
        """All of them; allocators, libraries and data come on top."""
        return self.frozen + self.trainable + self.gradients + self.moments + self.saved + self.head


def training_memory(
    parameters: Parameters,
    saved: SavedTensors,
    train: TrainConfig,
    *,
    sequence_length: int,
    vocab_size: int,
    num_processes: int,  # that share a step
    device_type: str,  # decides the size of a chunk of logits
    distils: bool,  # whether the base's predictions are learned from too
) -> Memory:
    """Return what one process holds.

    Logits that are kept whole exist three times in float32 when the backward pass begins: their log-softmax, its
    gradient and theirs. In chunks they exist as their products gave them and, in float32, as log-probabilities; where
    products are less precise also as the gradient that goes into the next ones. Where the base is distilled, both
    heads' log-probabilities stand beside them, and the base's probabilities of one sequence, all in float32.
    """
    num_tokens = train.sequences_at_once(num_processes) * sequence_length
    product_dtype = torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32
    if saved.head_bytes_per_token:
        head = num_tokens * vocab_size * 3 * torch.float32.itemsize
    else:
        num_rows = min(rows_at_once(device_type, vocab_size), num_tokens)
        lowered = 0 if product_dtype == torch.float32 else product_dtype.itemsize
        head = num_rows * vocab_size * (product_dtype.itemsize + torch.float32.itemsize + lowered)
        if distils:
            head = (4 * num_rows + min(num_rows, sequence_length)) * vocab_size * torch.float32.itemsize
    return Memory(
        frozen=parameters.frozen_bytes,
        trainable=parameters.trainable_bytes,
        gradients=parameters.trainable_bytes,
        moments=parameters.moments_bytes,
        saved=saved.copies_bytes + num_tokens * (saved.bytes_per_token + sequence_length * saved.bytes_per_pair),
        head=head,
    )


def memory_of_run(config: RunConfig, num_processes: int, device_type: str, model: MethodModel | None = None) -> Memory:
    """Return what one process of a run holds; `model` is its own without weights, else that of a widened run."""
    model = model_without_weights(config) if model is None else model
    parameters = Parameters.of(model, config.train)
    saved = count_saved_tensors(model, config.train.mixed_precision, masked=attends_by_mask(config, device_type))
    return training_memory(
        parameters,
        saved,
        config.train,
        sequence_length=config.corpus.sequence_length,
        vocab_size=int(model.config.vocab_size),
        num_processes=num_processes,
        device_type=device_type,
        distils=config.method.distils,
    )
