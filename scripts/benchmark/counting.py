"""Counts that need no clock: floating-point operations, activations saved for backward, peak memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.loss.loss_utils import ForCausalLMLoss

from scale_cli.model.head_loss import trained_head_cross_entropy
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.processes import autocast

# PyTorch's counter does not count this in-place product.
SUMMED_IN_PLACE = {
    torch.ops.aten.addmm_: lambda _total, left, right, **_: 2 * left[0] * left[1] * right[1]
}


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


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count a fused kernel's forward products; its keys may have fewer heads than its queries."""
    return sdpa_flop_count(query, _with_heads_of(query, key), _with_heads_of(query, value))


def _attention_backward_flops(
    grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    keys, values = _with_heads_of(query, key), _with_heads_of(query, value)
    return sdpa_backward_flop_count(grad_out, query, keys, values)


def _with_heads_of(query: Any, grouped: Any) -> Any:
    """Return the shape (B, N, S, A) that grouped keys or values have when every query head has its own."""
    return (*grouped[:1], query[1], *grouped[2:])


_FUSED_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)

# The counter refuses grouped heads, and knows neither the in-place products nor the CPU's kernel.
_COUNTED_BY_US = {
    **SUMMED_IN_PLACE,
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): _attention_flops
        for name in _FUSED_ATTENTION
    },
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flops
        for name in _FUSED_ATTENTION
    },
}


def count_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products and the attention of one training step."""
    with FlopCounterMode(display=False, custom_mapping=_COUNTED_BY_US) as counter:
        step()
    return counter.get_total_flops()


def saved_activation_bytes(model: Any, input_ids: Tensor, mixed_precision: str) -> int:
    """Return the bytes that the decoder keeps of a batch for its backward pass: distinct storages, without the head.

    Only what grows with the batch is an activation: weights, and autocast's copies of them, are not.

    Args:
        model: widened, plain, or plain with PEFT's adapters.
        input_ids: (B, T), at least two sequences.
        mixed_precision: no or bf16.
    """
    num_sequences = len(input_ids)
    of_all, of_one = (
        _saved_bytes(model, ids, mixed_precision) for ids in (input_ids, input_ids[:1])
    )
    return (of_all - of_one) * num_sequences // (num_sequences - 1)


def _saved_bytes(model: Any, input_ids: Tensor, mixed_precision: str) -> int:
    with kept_for_backward(model, input_ids.device.type, mixed_precision) as kept:
        states = run_decoder(model, input_ids)
    del states
    return num_bytes(kept.values())


def run_decoder(model: Any, input_ids: Tensor) -> Any:
    """Run a model in training mode up to the input of its vocabulary head."""
    model.train()
    if isinstance(model, ScaleForCausalLM):
        return model.final_states(input_ids, with_base_head=False)
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return plain.get_decoder()(input_ids, use_cache=False)


class LiveBytes(TorchDispatchMode):
    """Follows allocations within the context, on any device and on fake tensors: the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_flatten((args, kwargs))[0]:
            if isinstance(given, Tensor):
                self._known.add(given.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for made in tree_flatten(result)[0]:
            if isinstance(made, Tensor) and made.untyped_storage() not in self._known:
                self._follow(made.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        self._known.add(storage)
        num_bytes = storage.nbytes()
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that a step held at once, without what existed before it."""
    with LiveBytes() as bytes_of:
        step()
    return bytes_of.peak


# Sizes of Llama-3.2-1B's vocabulary head, measured on fake tensors: shapes without numbers.
VOCABULARY, NUM_TOKENS, HIDDEN, EXPANSION = 128_256, 8192, 2048, 256


def head_peak_bytes(device: str) -> tuple[int, int]:
    """Return the peak memory of a head's forward and backward: ours in chunks, and transformers' on whole logits.

    Both compute H x + H' u, with H frozen in bfloat16 and H' trained, for 8,192 tokens and a vocabulary of 128,256.
    """

    def whole(x: Tensor, u: Tensor, base_head: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = x @ base_head.T + u @ head.to(u.dtype).T
        return ForCausalLMLoss(logits, targets, VOCABULARY, shift_labels=targets)

    return _peak(trained_head_cross_entropy, device), _peak(whole, device)


def _peak(loss_of: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor], device: str) -> int:
    with FakeTensorMode():
        x = torch.empty(4, NUM_TOKENS // 4, HIDDEN, dtype=torch.bfloat16, device=device)
        u = torch.empty(
            4, NUM_TOKENS // 4, EXPANSION, dtype=torch.bfloat16, device=device
        ).requires_grad_()
        base_head = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device)
        head = torch.empty(VOCABULARY, EXPANSION, device=device).requires_grad_()
        targets = torch.zeros(4, NUM_TOKENS // 4, dtype=torch.long, device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(x, u, base_head, head, targets)
            loss.backward()

        return peak_bytes(step)
