from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from scale_cli.model import routing
from scale_cli.model.fused_scale import (
    NormForm,
    add_product,
    frozen_norm,
    lower_weights,
)
from tests.widening import tiny_llama, widen


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = [random(*output.shape, seed=index + 7).to(output.dtype) for index, output in enumerate(outputs)]
    total = sum(
        (output * weight).sum() for output, weight in zip(outputs, weights, strict=True) if output.requires_grad
    )
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, leaves)


def base_norm(size: int) -> Any:
    norm = LlamaRMSNorm(size, eps=1e-5).requires_grad_(False)
    norm.weight.copy_(1 + random(size, seed=3))
    return norm


def test_in_bfloat16_the_base_stream_keeps_its_bits_and_the_statistics_float32() -> None:
    norm, x = base_norm(12).bfloat16(), random(2, 5, 12).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        normed, inverse = frozen_norm(norm, NormForm(), x)
    assert torch.equal(normed, norm(x))
    assert inverse.dtype == torch.float32
    assert gradients((normed, inverse), [x])[0].dtype == torch.bfloat16


def test_weights_are_lowered_and_their_gradients_raised_as_autocast_does_it() -> None:
    weights = [random(3, 4).requires_grad_(), random(5, 2, seed=1).requires_grad_()]
    assert lower_weights(weights) == dict(zip(weights, weights, strict=True)), "without autocast nothing is copied"
    with torch.autocast("cpu", torch.bfloat16):
        lowered = lower_weights(weights)
    outputs, expected = tuple(lowered.values()), tuple(weight.bfloat16() for weight in weights)
    for one, other in zip(outputs, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
    for one, other in zip(gradients(outputs, weights), gradients(expected, weights), strict=True):
        assert torch.equal(one, other)


class _Kernels(TorchDispatchMode):
    """Counts what a device would be given to do: every operation that is no view and no allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.count += not (func.is_view or name in ("_unsafe_view", "detach", "lift_fresh") or "empty" in name)
        return func(*args, **(kwargs or {}))


def test_a_training_forward_of_sixteen_layers_launches_at_most_1500_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", 8 * 61)
    monkeypatch.setattr(routing, "FEWEST_ROWS", 8)  # 16 chunks of the loss, as a GPU has of 8,192 tokens
    model = widen(tiny_llama(num_hidden_layers=16).bfloat16(), "preserve")
    ids = torch.randint(0, 61, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), _Kernels() as kernels:
        model.train()(ids, labels=ids, shift_labels=ids, num_items_in_batch=128, token_losses=torch.empty(1, 128))
    assert kernels.count <= 1500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_adding_a_product_is_adding_it(dtype: torch.dtype, mixed_precision: bool) -> None:
    u, weight = random(6, 3, seed=1).requires_grad_(), random(4, 3, seed=2).requires_grad_()
    y = random(6, 4).to(dtype)
    if mixed_precision:
        y = y.bfloat16()
    rtol, atol = (2e-2, 4e-2) if y.dtype == torch.bfloat16 else (1e-5, 1e-6)
    expected = y.float() + F.linear(u, weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision):
        added = add_product(y.clone(), u, weight)
    assert added.dtype == y.dtype
    torch.testing.assert_close(added.float(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        gradients((added,), [u, weight]), gradients((expected,), [u, weight]), rtol=5e-2, atol=5e-2
    )
