from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_cli.model import routing
from scale_cli.model.fused_scale import cast_for_products
from tests.widening import random_ids, tiny_llama, widen


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_are_lowered_and_their_gradients_raised_as_autocast_does_it() -> None:
    weights = [random(3, 4).requires_grad_(), random(5, 2, seed=1).requires_grad_()]
    assert cast_for_products(weights) == dict(zip(weights, weights, strict=True)), (
        "without autocast nothing is copied"
    )
    with torch.autocast("cpu", torch.bfloat16):
        lowered = tuple(cast_for_products(weights).values())
    expected = tuple(weight.bfloat16() for weight in weights)
    assert {one.dtype for one in lowered} == {torch.bfloat16}
    assert all(map(torch.equal, lowered, expected))
    given = [random(*weight.shape, seed=7).bfloat16() for weight in weights]
    ours, theirs = (torch.autograd.grad(made, weights, given) for made in (lowered, expected))
    assert all(map(torch.equal, ours, theirs))


class _Kernels(TorchDispatchMode):
    """Counts what a device would be given to do: every operation that is no view and no allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.count += not (
            func.is_view or name in ("_unsafe_view", "detach", "lift_fresh") or "empty" in name
        )
        return func(*args, **(kwargs or {}))


def test_a_training_forward_of_sixteen_layers_launches_at_most_1500_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", 8 * 61)
    # 16 chunks of the loss, as a GPU has of 8,192 tokens.
    monkeypatch.setattr(routing, "FEWEST_ROWS", 8)
    model = widen(tiny_llama(num_hidden_layers=16).bfloat16(), "preserve")
    ids = random_ids(1, 128)
    with torch.autocast("cpu", torch.bfloat16), _Kernels() as kernels:
        options = {"num_items_in_batch": 128, "token_losses": torch.empty(1, 128)}
        model.train()(ids, labels=ids, shift_labels=ids, **options)
    assert kernels.count <= 1500
