"""What one forward and backward pass of a real model computes and keeps, counted without computing or keeping it.

Products are counted on the meta device, where tensors have shapes and no numbers. What is saved for the backward pass
depends on autocast, which the meta device does not know, so that is counted on fake CPU tensors: PyTorch's own
dispatch, autocast and fused attention included, without storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from scale_cli.config.schema import RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.upscale.method import MethodModel, NewPieces, any_base_without_weights, build_model
from scale_cli.upscale.objective import for_training
from scale_cli.upscale.run import Run

# A plan is of the model as it stands: neither compiled nor checkpointed.
_UNCOMPILED = TrainConfig(max_steps=1)
# Lengths of a window to count in: one that no width of a model is a multiple of tells tokens from weights.
_LENGTHS = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

# The attention of a real step. Under its own name transformers would look at numbers to see that no mask is needed;
# under a name without a mask function it does not, and leaves causality to the kernel as it does in a real step.
_UNMASKED = "sdpa_without_mask"
AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
# The same where documents are isolated: which pairs of positions are masked makes no mask smaller.
_MASKED = "sdpa_with_mask"
AttentionInterface.register(_MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(
    _MASKED,
    lambda batch_size, q_length, kv_length, **_: torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool),
)


# The counter does not know a product that is summed in place.
SUMMED_IN_PLACE = {torch.ops.aten.addmm_: lambda _total, left, right, **_: 2 * left[0] * left[1] * right[1]}


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of training on one token, forward and backward: every product of matrices that a real model computes."""

    products: float  # linear maps and the vocabulary head
    attention_per_key: float  # of queries, keys and values, for every position that a token sees

    def total(self, sequence_length: int) -> float:
        """Return all of them in windows of some length; attention is causal: a token sees (T + 1) / 2 keys."""
        return self.products + self.attention_per_key * (sequence_length + 1) / 2


def count_flops(model: MethodModel, sequence_length: int) -> TokenFlops:
    """Return the FLOPs of a token of one training window, of a model on the meta device.

    There attention is products of its own, over every key: two forward, four backward where all train.
    """
    for parameter in model.parameters():
        parameter._backward_hooks = None  # OSF's projections of gradients: a step's, not a token's
    with torch.device("meta"), FlopCounterMode(display=False, custom_mapping=SUMMED_IN_PLACE) as counter:
        _loss(model, sequence_length).backward()
    model.zero_grad(set_to_none=True)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    products = counter.get_total_flops() - attention
    return TokenFlops(products / sequence_length, attention / sequence_length**2)


def model_without_weights(config: RunConfig) -> MethodModel:
    """Return a run's model on the meta device; its new tokens are those that have been learned."""
    base, new = any_base_without_weights(config.model), None
    if config.method.vocabulary is not None:
        new = NewPieces.unknown(len(Run(config).tokenizer) - base.config.vocab_size)
    with torch.device("meta"):
        return build_model(base, config.method, config.seed, new)


@dataclass(frozen=True)
class SavedTensors:
    """What autograd keeps from the forward pass for the backward pass, parameters themselves left out."""

    copies_bytes: int  # what does not grow with the batch: weights in the precision of autocast, mostly
    bytes_per_token: int  # of the decoder
    head_bytes_per_token: int  # of the vocabulary's width
    bytes_per_pair: int = 0  # of two positions of a window: masks, where documents are isolated by them


def count_saved_tensors(model: MethodModel, mixed_precision: str, *, masked: bool = False) -> SavedTensors:
    """Return what a training forward keeps for the backward pass; fused attention keeps no scores.

    The model, on the meta device, is left on fake tensors. Where attention is `masked`, as by sdpa for isolated
    documents, every call keeps a mask.
    """
    length = _no_width_of(model)
    with FakeTensorMode():
        _put_on_fake_cpu(model)
        with kept_for_backward(model, "cpu", mixed_precision) as kept:
            _loss(model, length, _MASKED if masked else _UNMASKED)
    masks = {key: tensor for key, tensor in kept.items() if tensor.shape[-2:] == (length, length)}
    for key in masks:
        del kept[key]
    of_tokens = [tensor for tensor in kept.values() if tensor.untyped_storage().nbytes() % length == 0]
    wide = num_bytes(tensor for tensor in of_tokens if tensor.shape[-1:] == (model.config.vocab_size,))
    all_of_tokens = num_bytes(of_tokens)
    of_pairs = num_bytes(masks.values()) // length**2 + masked  # and the one mask that all are made of
    return SavedTensors(
        num_bytes(kept.values()) - all_of_tokens, (all_of_tokens - wide) // length, wide // length, of_pairs
    )


def _no_width_of(model: MethodModel) -> int:
    """Return a window's length that what is of the model, a weight in another precision, has no multiple of."""
    widths = {width for tensor in chain(model.parameters(), model.buffers()) for width in tensor.shape}
    return next(length for length in _LENGTHS if all(width % length for width in widths))


def _loss(model: MethodModel, sequence_length: int, attention: str = _UNMASKED) -> Tensor:
    ids = torch.zeros(1, sequence_length, dtype=torch.long)
    model.train()
    model.set_attn_implementation(attention)
    trained = for_training(model, _UNCOMPILED)
    output = trained(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=sequence_length, use_cache=False)
    return output.loss


@contextmanager
def kept_for_backward(model: nn.Module, device_type: str, mixed_precision: str) -> Iterator[dict[int, Tensor]]:
    """Yield what autograd keeps of a forward pass, parameters left out, by storage: one tensor of each."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # held with its storage's address, which another one could get otherwise

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            kept[storage] = tensor
        return tensor

    with (
        torch.autocast(device_type, torch.bfloat16, enabled=mixed_precision == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        yield kept


def num_bytes(kept: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors' whole storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def _put_on_fake_cpu(model: nn.Module) -> None:
    """Replace every tensor of a model by a fake one (`Module.to` cannot); tied ones stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replaced:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, replaced[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
