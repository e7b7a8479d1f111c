"""FLOPs and memory of a training step, counted without weights, and the speed of a device, measured or stated.

FLOPs are counted on the meta device, where tensors have shapes and no numbers. The memory saved for the backward pass
depends on autocast, which the meta device does not know. So it is counted on fake CPU tensors, which run PyTorch's own
dispatch, autocast and fused attention without storage.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.model.routing import rows_at_once
from scale_cli.processes import autocast, device_name, lowered_dtype
from scale_cli.processes import device as own_device
from scale_cli.runs.opened import Run
from scale_cli.terminal import log
from scale_cli.training.objective import attends_by_mask, for_training
from scale_cli.training.optimiser import kinds_of_parameters, moments_of
from scale_cli.upscale.base import base_without_weights, load_base_config
from scale_cli.upscale.building import MethodModel, NewPieces, build_model
from scale_cli.upscale.quantised_base import empty_as, parts_of

# Plans assume a model that is neither compiled nor checkpointed.
_UNCOMPILED = TrainConfig(max_steps=1)
# Window lengths to count in: the first that divides no width of the model, to tell tokens from weights.
_LENGTHS = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

# The attention of a real step. Under its own name, transformers would read tensor values to see that no mask is needed.
# Under a name without a mask function it does not, and leaves causality to the kernel, as in a real step.
_UNMASKED = "sdpa_without_mask"
AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
# The same for isolated documents: a mask has the same size whichever pairs it masks.
_MASKED = "sdpa_with_mask"
AttentionInterface.register(_MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(
    _MASKED,
    lambda batch_size, q_length, kv_length, **_: torch.ones(
        batch_size, 1, q_length, kv_length, dtype=torch.bool
    ),
)
# PyTorch's counter does not count this in-place product.
SUMMED_IN_PLACE = {
    torch.ops.aten.addmm_: lambda _total, left, right, **_: 2 * left[0] * left[1] * right[1]
}


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of training on one token, forward and backward: all matrix products of a real model."""

    products: float  # linear maps and the vocabulary head
    attention_per_key: float  # of queries, keys and values, per position that a token sees

    def total(self, sequence_length: int) -> float:
        """Return the total for a window length; attention is causal, so a token sees (T + 1) / 2 keys on average."""
        return self.products + self.attention_per_key * (sequence_length + 1) / 2


def count_flops(model: MethodModel, sequence_length: int) -> TokenFlops:
    """Return the FLOPs per token of one training window, for a model on the meta device.

    There, attention is separate products over every key: two forward, four backward if all of it trains.
    """
    with (
        torch.device("meta"),
        FlopCounterMode(display=False, custom_mapping=SUMMED_IN_PLACE) as counter,
    ):
        _loss(model, sequence_length).backward()
    model.zero_grad(set_to_none=True)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    products = counter.get_total_flops() - attention
    return TokenFlops(products / sequence_length, attention / sequence_length**2)


def model_without_weights(config: RunConfig) -> MethodModel:
    """Return a run's model on the meta device; its new tokens must have been learned."""
    base, new = (
        base_without_weights(
            load_base_config(config.model), config.model.dtype, config.model.quantisation
        ),
        None,
    )
    if config.method.vocabulary is not None:
        new = NewPieces.unknown(len(Run(config).tokenizer) - base.config.vocab_size)
    with torch.device("meta"):
        return build_model(base, config.method, config.seed, new)


@dataclass(frozen=True)
class SavedTensors:
    """What autograd keeps from the forward pass for the backward pass, without the parameters themselves."""

    copies_bytes: int  # independent of the batch: mostly weights in autocast's precision
    bytes_per_token: int  # of the decoder
    head_bytes_per_token: int  # of tensors as wide as the vocabulary
    bytes_per_pair: int = 0  # per pair of positions in a window: masks that isolate documents


def count_saved_tensors(
    model: MethodModel, mixed_precision: str, *, masked: bool = False
) -> SavedTensors:
    """Return what a training forward keeps for the backward pass; fused attention keeps no scores.

    It moves the model from the meta device to fake tensors. If attention is `masked`, as sdpa is for isolated
    documents, each call keeps a mask.
    """
    widths = {
        width for tensor in chain(model.parameters(), model.buffers()) for width in tensor.shape
    }
    length = next(length for length in _LENGTHS if all(width % length for width in widths))
    with FakeTensorMode():
        _put_on_fake_cpu(model)
        with kept_for_backward(model, "cpu", mixed_precision) as kept:
            _loss(model, length, _MASKED if masked else _UNMASKED)
    masks = {key: tensor for key, tensor in kept.items() if tensor.shape[-2:] == (length, length)}
    for key in masks:
        del kept[key]
    of_tokens = [
        tensor for tensor in kept.values() if tensor.untyped_storage().nbytes() % length == 0
    ]
    wide = num_bytes(
        tensor for tensor in of_tokens if tensor.shape[-1:] == (model.config.vocab_size,)
    )
    all_of_tokens = num_bytes(of_tokens)
    of_pairs = (
        num_bytes(masks.values()) // length**2 + masked
    )  # plus the one mask that all are made from
    return SavedTensors(
        num_bytes(kept.values()) - all_of_tokens,
        (all_of_tokens - wide) // length,
        wide // length,
        of_pairs,
    )


def _loss(model: MethodModel, sequence_length: int, attention: str = _UNMASKED) -> Tensor:
    model.train()
    model.set_attn_implementation(attention)
    return _loss_of(
        for_training(model, _UNCOMPILED), torch.zeros(1, sequence_length, dtype=torch.long)
    )


def _loss_of(trained: nn.Module, ids: Tensor) -> Tensor:
    output = trained(
        input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=ids.numel(), use_cache=False
    )
    loss: Tensor = output.loss
    return loss


@contextmanager
def kept_for_backward(
    model: nn.Module, device_type: str, mixed_precision: str
) -> Iterator[dict[int, Tensor]]:
    """Yield what autograd keeps of a forward pass, without parameters: one tensor for each storage."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no other storage gets the same address

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            kept[storage] = tensor
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with autocast(device_type, mixed_precision), keeping:
        yield kept


def num_bytes(kept: Iterable[Tensor]) -> int:
    """Return the total bytes of the tensors' whole storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def _put_on_fake_cpu(model: nn.Module) -> None:
    """Replace every tensor of a model by a fake one, which `Module.to` cannot do; tied tensors stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replaced:
                empty = empty_as(parameter)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, replaced[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


@dataclass(frozen=True)
class Parameters:
    """The numbers of parameters, tied ones counted once, and their bytes."""

    num_frozen: int  # that no optimiser updates
    num_trainable: int  # that an optimiser updates
    frozen_bytes: int  # in their own dtype
    trainable_bytes: int  # of the float32 master copy
    moments_bytes: int  # of the optimiser: two moments for AdamW, a momentum per matrix for Muon

    @classmethod
    def of(cls, model: MethodModel, train: TrainConfig) -> Parameters:
        parameters, kinds = dict(model.named_parameters()), kinds_of_parameters(model)
        frozen = [parameter for name, parameter in parameters.items() if name not in kinds]
        trainable = [parameters[name] for name in kinds]
        trainable_bytes = sum(parameter.nbytes for parameter in trainable)
        copies = {name: len(moments_of(kind, train.optimiser)) for name, kind in kinds.items()}
        return cls(
            num_frozen=sum(parameter.numel() for parameter in frozen),
            num_trainable=sum(parameter.numel() for parameter in trainable),
            frozen_bytes=sum(held.nbytes for tensor in frozen for held in parts_of(tensor)),
            trainable_bytes=trainable_bytes,
            moments_bytes=sum(parameters[name].nbytes * number for name, number in copies.items()),
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the trained parameters and their moments; the base is never written."""
        return self.trainable_bytes + self.moments_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds from the last forward to the first backward product of a step."""

    frozen: int
    trainable: int  # float32 master weights
    gradients: int  # float32; with several processes they lie in DistributedDataParallel's buckets
    moments: int  # the optimiser's
    saved: int  # by a micro-batch for the backward pass, with weights in autocast's precision
    head: int  # logits computed at once, and what is derived from them

    @property
    def total(self) -> int:
        """The sum; allocators, libraries and data need more."""
        return sum(vars(self).values())


def training_memory(
    parameters: Parameters,
    saved: SavedTensors,
    train: TrainConfig,
    *,
    sequence_length: int,
    vocab_size: int,
    num_processes: int,  # that share a step
    device_type: str,  # sets the size of a chunk of logits
    distils: bool,  # whether the base is distilled
) -> Memory:
    """Return what one process holds.

    Logits that are kept whole exist three times in float32 when the backward pass begins: their log-softmax, its
    gradient and their own gradient. Logits in chunks exist in the precision of the products and, in float32, as
    log-probabilities. If the products are less precise, the gradient for the next products exists too. Distillation
    adds both heads' log-probabilities, and the base's probabilities of one sequence, all in float32.
    """
    num_tokens = train.sequences_at_once(num_processes) * sequence_length
    product_dtype = lowered_dtype(train.mixed_precision) or torch.float32
    if saved.head_bytes_per_token:
        head = num_tokens * vocab_size * 3 * torch.float32.itemsize
    else:
        num_rows = min(rows_at_once(device_type, vocab_size), num_tokens)
        lowered = 0 if product_dtype == torch.float32 else product_dtype.itemsize
        head = num_rows * vocab_size * (product_dtype.itemsize + torch.float32.itemsize + lowered)
        if distils:
            head = (
                (4 * num_rows + min(num_rows, sequence_length))
                * vocab_size
                * torch.float32.itemsize
            )
    return Memory(
        frozen=parameters.frozen_bytes,
        trainable=parameters.trainable_bytes,
        gradients=parameters.trainable_bytes,
        moments=parameters.moments_bytes,
        saved=saved.copies_bytes
        + num_tokens * (saved.bytes_per_token + sequence_length * saved.bytes_per_pair),
        head=head,
    )


def memory_of_run(
    config: RunConfig, num_processes: int, device_type: str, model: MethodModel | None = None
) -> Memory:
    """Return what one process of a run holds; `model`, without weights, is by default built from the config."""
    model = model_without_weights(config) if model is None else model
    return training_memory(
        Parameters.of(model, config.train),
        count_saved_tensors(
            model, config.train.mixed_precision, masked=attends_by_mask(config, device_type)
        ),
        config.train,
        sequence_length=config.corpus.sequence_length,
        vocab_size=int(model.config.vocab_size),
        num_processes=num_processes,
        device_type=device_type,
        distils=config.method.distils,
    )


# Of the timed step of one layer: it shows the speed of all layers, and takes little time and memory.
_VOCABULARY, _LENGTH = 2048, 128
_LEAST_STEP_S, _MOST_WINDOWS = 0.1, 128
_NUM_TIMINGS = 9
# FLOP/s of dense 16-bit products, from the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


@dataclass(frozen=True)
class Device:
    """A device, with the speed that a plan's times use."""

    type: str  # `cpu` or `cuda`; `cuda` if the speed is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where flops_per_s comes from, for the terminal


def measure_device(base_config: Any, dtype: str, mixed_precision: str) -> Device:
    """Measure the speed of the device with training steps of a widened model that has one of the base's layers.

    The steps grow until one takes a tenth of a second; the result is the median of several.
    """
    where = own_device()
    config = copy.deepcopy(base_config)
    config.num_hidden_layers, config.vocab_size = 1, min(config.vocab_size, _VOCABULARY)
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        model: Any = build_model(base_without_weights(config, dtype), MethodConfig(), seed=0)
    flops = count_flops(model, _LENGTH).total(_LENGTH)
    model.to_empty(device=where)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.fill_(1)
    trained: Any = for_training(model.train(), _UNCOMPILED)

    def time_step(num_windows: int) -> float:
        ids = torch.zeros(num_windows, _LENGTH, dtype=torch.long, device=where)
        started_s = time.perf_counter()
        with autocast(where.type, mixed_precision):
            loss = _loss_of(trained, ids)
        loss.backward()
        model.zero_grad(set_to_none=True)
        if where.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started_s

    precision = str(lowered_dtype(mixed_precision) or torch.float32).removeprefix("torch.")
    log(f"measuring      {device_name(where)}: training steps of one layer in {precision}")
    time_step(1)  # warm-up
    num_windows = 1
    while time_step(num_windows) < _LEAST_STEP_S and num_windows < _MOST_WINDOWS:
        num_windows *= 2
    elapsed_s = median(time_step(num_windows) for _ in range(_NUM_TIMINGS))
    measured = f"measured on {device_name(where)}: steps of one layer in {precision}"
    return Device(where.type, flops * num_windows * _LENGTH / elapsed_s, measured)


def peak_tokens_per_s(config: RunConfig, named: str, num_processes: int) -> float | None:
    """Return the tokens per second that a run could train on if its devices did nothing but its products.

    It uses the makers' figures; None if none is known. The share that training reaches is its MFU.
    """
    if (peak := peak_flops_per_s(named, config.train.mixed_precision)) is None:
        return None
    length = config.corpus.sequence_length
    return num_processes * peak / count_flops(model_without_weights(config), length).total(length)


def peak_flops_per_s(named: str, mixed_precision: str) -> float | None:
    """Return the FLOP/s that a device's maker states for the run's precision; None if no figure is known."""
    if mixed_precision == "no":
        return None
    known = (
        peak for name, peak in _PEAK_FLOPS_PER_S.items() if re.search(rf"\b{name}\b(?! NVL)", named)
    )
    return next(known, None)
