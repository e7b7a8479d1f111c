from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.model import head_loss
from scale_cli.model.head_loss import IGNORED, adaptation_cross_entropy, plain_cross_entropy


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, u, base_head, head = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 11, 16), (3, 11, 8), (64, 16), (64, 8))
    )
    targets = torch.randint(0, 64, (3, 11), generator=generator)
    targets[0, :4] = IGNORED
    return x, u, base_head, head, targets


@pytest.mark.parametrize("logits_at_once", [1, 64 * 5, 2**21], ids=["row by row", "5 rows", "all at once"])
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch, logits_at_once: int) -> None:
    monkeypatch.setitem(head_loss._LOGITS_AT_ONCE, "cpu", logits_at_once)
    monkeypatch.setattr(head_loss, "_FEWEST_ROWS", 1)
    x, u, base_head, head, targets = inputs(torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, u, head)]
    whole = F.cross_entropy((x @ base_head.T + u @ head.T).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(whole, leaves)
    chunked = adaptation_cross_entropy(x, u, base_head, head, targets)
    torch.testing.assert_close(chunked, whole.float())
    for gradient, wanted in zip(torch.autograd.grad(chunked, leaves), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_a_frozen_stream_and_the_frozen_head_get_no_gradient() -> None:
    x, u, base_head, head, targets = inputs(torch.float32)
    adaptation_cross_entropy(
        x, u.requires_grad_(), base_head.requires_grad_(), head.requires_grad_(), targets
    ).backward()
    assert x.grad is None and base_head.grad is None
    assert u.grad is not None and head.grad is not None


def test_under_autocast_it_is_as_near_to_float32_as_whole_logits_are() -> None:
    x, u, base_head, head, targets = inputs(torch.float32)
    u.requires_grad_()
    (exact,) = torch.autograd.grad(adaptation_cross_entropy(x, u, base_head, head, targets), u)
    with torch.autocast("cpu", torch.bfloat16):
        (chunked,) = torch.autograd.grad(adaptation_cross_entropy(x, u, base_head, head, targets), u)
        logits = F.linear(x, base_head) + F.linear(u, head)
        whole_loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    (whole,) = torch.autograd.grad(whole_loss, u)
    assert (chunked - exact).norm() <= 1.2 * (whole - exact).norm()


def test_ignored_targets_give_no_loss_and_no_gradient() -> None:
    x, u, base_head, head, targets = inputs(torch.float32)
    loss = adaptation_cross_entropy(x, u.requires_grad_(), base_head, head, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert u.grad is not None and not u.grad.any()


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_plain_heads_loss_and_gradients_are_those_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, head_trains: bool
) -> None:
    monkeypatch.setitem(head_loss._LOGITS_AT_ONCE, "cpu", 64 * 5)
    monkeypatch.setattr(head_loss, "_FEWEST_ROWS", 1)
    x, _, head, _, targets = inputs(torch.float64)
    leaves = [tensor.requires_grad_() for tensor in ((x, head) if head_trains else (x,))]
    whole = F.cross_entropy((x @ head.T).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(whole, leaves)
    chunked = plain_cross_entropy(x, head, targets)
    torch.testing.assert_close(chunked, whole.float())
    for gradient, wanted in zip(torch.autograd.grad(chunked, leaves), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    x, u, base_head, head, targets = inputs(torch.float32)
    loss = adaptation_cross_entropy(x, u.requires_grad_(), base_head, head, targets)
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * loss).backward()
