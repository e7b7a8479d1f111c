"""A frozen base whose linear maps torchao holds in 8 bits; embedding, norms and vocabulary head
stay whole.

A weight takes one byte, beside a float32 scale s for each row: y = (Q x) s, computed in the dtype
that the base was loaded in. `plain_weight` returns the W that this stands for, as numbers.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import Tensor, nn

from scale_cli.terminal import progress_bar

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def torchao_settings() -> Any:
    """Return the settings for torchao, and for transformers' TorchAoConfig."""
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def quantise(base: Any) -> None:
    """Quantise a plain base in place, as transformers does while loading; this works on the meta
    device too.
    """
    from torchao.quantization import quantize_

    for linear in base.model.modules():
        if isinstance(linear, nn.Linear):
            quantize_(linear, torchao_settings())


def is_quantised(tensor: Tensor) -> bool:
    return type(tensor).__module__.startswith("torchao.")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a quantised tensor; for a plain tensor, itself."""
    if not is_quantised(tensor):
        return [tensor]
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def plain_weight(linear: nn.Linear) -> Tensor:
    """Return W as numbers, in the dtype in which the map computes; not a copy if it is not
    quantised.
    """
    return linear.weight.dequantize() if is_quantised(linear.weight) else linear.weight


def dequantise(model: AnyModule) -> AnyModule:
    """Replace every quantised weight of a model by its plain numbers, in place, and return the
    model.
    """
    held = [of for of in model.modules() if isinstance(of, nn.Linear) and is_quantised(of.weight)]
    bar = progress_bar(iterable=held, desc="dequantising", unit=" maps", delay=1.0, leave=False)
    for module in bar:
        module.weight = nn.Parameter(plain_weight(module), requires_grad=False)
    return model
