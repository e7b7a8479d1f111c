"""A frozen base whose linear maps torchao holds in 8 or 4 bits; embedding, norms and vocabulary head stay whole.

| name | a weight is held in | beside the weights                             | y                                |
|------|---------------------|------------------------------------------------|----------------------------------|
| int8 | 1 byte              | a float32 scale s for each row                 | (Q x) s                          |
| nf4  | half a byte         | a scale for 64 weights, itself held in 8 bits  | W x, W restored for each product |

Both compute in the dtype that the base was loaded in. `plain_weight` returns the W that they stand for, as numbers.

Source of nf4: QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from scale_cli.model.family_scale import OWNERS

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def _nf4() -> Any:
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

    return NF4WeightOnlyConfig()


@dataclass(frozen=True)
class Quantisation:
    """How linear maps are held in memory."""

    settings: Callable[[], Any]  # for torchao, and for transformers' TorchAoConfig
    weights_multiple: int  # the number of weights of a matrix must be a multiple of this


QUANTISATIONS = {"int8": Quantisation(_int8, 1), "nf4": Quantisation(_nf4, 64 * 256)}


def quantised_maps(base: Any, quantisation: str) -> dict[str, nn.Linear]:
    """Return the linear maps of a plain base to quantise, by name; ValueError names one that cannot be quantised."""
    maps = {
        f"model.{name}": module
        for name, module in base.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for layer, (name, owner) in product(base.model.layers, OWNERS.items()):
        if not isinstance(getattr(getattr(layer, owner), name, None), nn.Linear):
            raise ValueError(
                f"a layer of the family {base.config.model_type} has no separate {name}"
            )
    multiple = QUANTISATIONS[quantisation].weights_multiple
    for name, linear in maps.items():
        if linear.weight.numel() % multiple:
            raise ValueError(
                f"{name} has {linear.weight.numel():,} weights, which is not a multiple of {multiple:,}"
            )
    return maps


def quantise(base: Any, quantisation: str) -> None:
    """Quantise a plain base in place, as transformers does while loading; this works on the meta device too."""
    from torchao.quantization import quantize_

    for linear in quantised_maps(base, quantisation).values():
        quantize_(linear, QUANTISATIONS[quantisation].settings())


def is_quantised(tensor: Tensor) -> bool:
    return type(tensor).__module__.startswith("torchao.")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a quantised tensor; for a plain tensor, itself."""
    if not is_quantised(tensor):
        return [tensor]
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def plain_weight(linear: nn.Linear) -> Tensor:
    """Return W as numbers, in the dtype in which the map computes; not a copy if it is not quantised."""
    weight: Any = linear.weight
    if not is_quantised(weight):
        return linear.weight
    return (
        weight.get_original_weight()
        if hasattr(weight, "get_original_weight")
        else weight.dequantize()
    )


def dequantise(model: AnyModule) -> AnyModule:
    """Replace every quantised weight of a model by its plain numbers, in place, and return the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantised(module.weight):
            module.weight = nn.Parameter(plain_weight(module), requires_grad=False)
    return model


def empty_as(tensor: Tensor) -> Tensor:
    """Return an uninitialised CPU tensor held in the same form as `tensor`."""
    if not is_quantised(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    kind: Any = type(tensor)
    names, context = cast(Any, tensor).__tensor_flatten__()
    parts = {name: empty_as(getattr(tensor, name)) for name in names}
    return kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
