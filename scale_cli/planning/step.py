"""What a training step costs, counted on the method's own model: its tensors are fake.

A fake tensor (torch's `FakeTensorMode`) has a shape, a dtype and a device, but no numbers. So the
forward and backward pass of training run over one window without weights, and a new method or
family is counted without a line for it.

- FLOPs are those of matrix products and attention, by torch's counter. Attention is causal: a token
  sees (T + 1) / 2 keys on average. Look-ups, norms, rotations and the optimiser are not counted.
- Memory is that of the storages that autograd saves. The window's length is a prime that divides the
  size of no weight. So a storage of a multiple of its square is a mask, of a multiple of it grows
  with the window, and any other is there whatever the batch.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.export.sizes import served_size
from scale_cli.processes import autocast, lowered_dtype
from scale_cli.training.objective import attending, for_training
from scale_cli.training.optimiser import kinds_of_parameters
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.building import MethodModel, NewPieces, build_model
from scale_cli.upscale.quantised_base import is_quantised, parts_of

FLOAT32 = 4
_LENGTH = 2053
_aten = torch.ops.aten
_MUON_STEPS = 5  # each is three products: X X^T, its square, and a polynomial of it times X

# sdpa as it is called with real tensors: transformers makes no mask for a name that it does not
# know, and one for every window of fake tensors.
_WITHOUT_MASK = "sdpa_without_mask"
ALL_ATTENTION_FUNCTIONS.register(_WITHOUT_MASK, sdpa_attention_forward)


@dataclass(frozen=True)
class StepCost:
    """What a step costs: bytes, and the FLOPs of training on a token."""

    vocab_size: int  # with new tokens
    num_served: int  # parameters of the plain model that a run is exported as
    num_frozen: int
    frozen_bytes: int
    trained: Counter[str]  # numbers by kind of tensor
    lowered: int | None  # bytes of an element under autocast; None without it
    lowered_head_bytes: int  # of the copy of the base's head that is multiplied under autocast
    product_flops: float  # of all maps, the head's included
    attention_per_key: float
    muon_flops: float  # of an update of all matrices
    bytes_per_token: int  # that autograd keeps
    bytes_per_pair: int  # of masks
    copies_bytes: int  # kept whatever the batch: lowered weights, the head's gradient
    keeps_logits: bool  # of all tokens, which `bytes_per_token` leaves out

    @property
    def num_trainable(self) -> int:
        return sum(self.trained.values())

    def flops(self, sequence_length: int) -> float:
        """Return the FLOPs of training on a token of a window."""
        return self.product_flops + self.attention_per_key * (sequence_length + 1) / 2


def step_cost(
    base_config: Any,
    method: MethodConfig,
    mixed_precision: str = "no",
    *,
    dtype: str = "float32",
    quantisation: str | None = None,
    num_new: int = 0,
    masked: bool = False,
) -> StepCost:
    """Return what one training step of a method costs.

    Args:
        base_config: the base's configuration, transformers' class.
        method: the method section of a config.
        mixed_precision: no, bf16 or fp16.
        dtype: in which the base is held.
        quantisation: of the base's linear maps; None: none.
        num_new: tokens that are added to the base's vocabulary.
        masked: whether attention takes a mask, as sdpa does for isolated documents.

    Raises:
        ConfigError: the method asks for what the base does not have.
    """
    # Its own copy: a method that takes new tokens changes the sizes in its base's configuration.
    base = base_without_weights(deepcopy(base_config), dtype, quantisation)
    new = NewPieces(["0"] * num_new, []) if num_new else None
    with torch.device("meta"):
        head = base.get_output_embeddings().weight
        model: Any = build_model(base, method, 0, new)
    num_served = served_size(model, base_config, "float32").parameters
    with FakeTensorMode():
        _make_fake(model)
        flops, kept = _counted_step(model, mixed_precision, masked=masked)

    trained: Counter[str] = Counter()
    muon_flops = 0.0
    for name, kind in kinds_of_parameters(model).items():
        parameter = model.get_parameter(name)
        trained[kind] += parameter.numel()
        if kind == "matrix":
            shorter = min(parameter.shape)
            muon_flops += _MUON_STEPS * 2.0 * shorter * (2 * parameter.numel() + shorter**2)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    vocab_size = base_config.vocab_size + num_new
    sizes = [
        tensor.untyped_storage().nbytes()
        for tensor in kept
        if tensor.shape[-2:] != (_LENGTH, vocab_size)
    ]
    of_pairs = sum(size for size in sizes if size % _LENGTH**2 == 0)
    of_tokens = sum(size for size in sizes if size % _LENGTH == 0) - of_pairs
    dtype_of_products = lowered_dtype(mixed_precision)
    lowered = None if dtype_of_products is None else dtype_of_products.itemsize
    # What trains is held in float32, whatever the base is held in.
    is_copied = head.requires_grad or head.dtype != dtype_of_products
    return StepCost(
        vocab_size=vocab_size,
        num_served=num_served,
        num_frozen=sum(parameter.numel() for parameter in frozen),
        frozen_bytes=sum(part.nbytes for parameter in frozen for part in parts_of(parameter)),
        trained=trained,
        lowered=lowered,
        lowered_head_bytes=is_copied * vocab_size * base_config.hidden_size * (lowered or 0),
        product_flops=flops.of_products / _LENGTH,
        attention_per_key=2 * flops.of_attention / (_LENGTH * (_LENGTH + 1)),
        muon_flops=muon_flops,
        bytes_per_token=of_tokens // _LENGTH,
        bytes_per_pair=of_pairs // _LENGTH**2,
        copies_bytes=sum(sizes) - of_pairs - of_tokens,
        keeps_logits=len(sizes) < len(kept),
    )


def _counted_step(
    model: MethodModel, mixed_precision: str, *, masked: bool
) -> tuple[_Counter, list[Tensor]]:
    """Return the FLOPs of a step on one window, and a tensor of each storage that it keeps."""
    attending(model).set_attn_implementation("sdpa" if masked else _WITHOUT_MASK)
    module = for_training(model.train(), TrainConfig(max_steps=1))
    held = {part.untyped_storage()._cdata for of in model.parameters() for part in parts_of(of)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in held:
            kept[storage] = tensor
        return tensor

    ids = torch.zeros(1, _LENGTH, dtype=torch.long)
    asked = {"labels": ids, "shift_labels": ids, "num_items_in_batch": _LENGTH}
    if masked:
        asked["position_ids"] = ids
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), _Counter() as counter:
        with autocast("cpu", mixed_precision), keeping:
            loss = module(input_ids=ids, use_cache=False, **asked).loss
        loss.backward()
    return counter, list(kept.values())


def _make_fake(model: nn.Module) -> None:
    """Replace a model's tensors, which lie on the meta device, by fake ones on the processor."""
    made: dict[Tensor, Any] = {}  # tied weights are one tensor
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    made[tensor] = _empty_like(tensor)
                tensors[name] = made[tensor]


def _empty_like(tensor: Tensor) -> Tensor:
    empty: Any
    if is_quantised(tensor):
        held: Any = tensor
        names, context = held.__tensor_flatten__()
        parts = {name: _empty_like(getattr(held, name)) for name in names}
        empty = type(held).__tensor_unflatten__(parts, context, held.shape, held.stride())
    else:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return cast(Tensor, empty)


class _Counter(TorchDispatchMode):
    """Counts the FLOPs of matrix products and of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.of_products = 0
        self.of_attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation is _aten._scaled_dot_product_flash_attention_for_cpu:
            self._attend(args[0], 2)  # Q K^T, P V
        elif operation is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
            q_grad, k_grad, v_grad = (of.requires_grad for of in args[1:4])
            # dP, and each gradient that is needed.
            self._attend(args[1], (q_grad or k_grad) + q_grad + k_grad + v_grad)
        elif operation is _aten.addmm_:
            self.of_products += flop_registry[_aten.addmm](*args, out_val=made)
        elif operation in flop_registry:
            self.of_products += flop_registry[operation](*args, **(kwargs or {}), out_val=made)
        return made

    def _attend(self, query: Tensor, num_products: int) -> None:
        """Add products of every query with (T + 1) / 2 keys."""
        self.of_attention += num_products * query.numel() * (query.shape[-2] + 1)
