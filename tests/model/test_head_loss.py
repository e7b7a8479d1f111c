import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.model import routing
from scale_cli.model.head_loss import IGNORED, plain_cross_entropy, trained_head_cross_entropy


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, u, base_head, head = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((3, 11, 16), (3, 11, 8), (64, 16), (64, 8))
    )
    targets = torch.randint(0, 64, (3, 11), generator=generator)
    targets[0, :4] = IGNORED
    return x, u, base_head, head, targets


@pytest.fixture(params=[1, 64 * 5, 2**21], ids=["row by row", "5 rows", "all at once"])
def in_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(routing.LOGITS_AT_ONCE, "cpu", request.param)
    monkeypatch.setattr(routing, "FEWEST_ROWS", 1)


def compare(chunked: Tensor, whole: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(chunked, whole.float())
    wanted = torch.autograd.grad(whole, leaves)
    for gradient, expected in zip(torch.autograd.grad(chunked, leaves), wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("weights", [None, (0.7, 0.0, 2.0)], ids=["plain", "distilled"])
def test_loss_and_gradients_are_those_of_whole_logits(weights: tuple[float, ...] | None) -> None:
    x, u, base_head, head, targets = inputs(torch.float64)
    leaves = [u.requires_grad_(), head.requires_grad_()]
    if weights is None:
        leaves.append(x.requires_grad_())
    base = x @ base_head.T
    trained = base + u @ head.T
    whole = F.cross_entropy(trained.flatten(0, 1), targets.flatten(), reduction="sum")
    if weights is not None:
        shares = trained.log_softmax(-1)
        of_base = base.log_softmax(-1)
        apart = F.kl_div(shares, of_base, log_target=True, reduction="none").sum(-1)
        whole = whole + (apart * (targets != IGNORED) * torch.tensor(weights).unsqueeze(1)).sum()
    chunked = trained_head_cross_entropy(x, u, base_head, head, targets, distillation=weights)
    compare(chunked, whole, leaves)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("head_trains", [True, False])
def test_a_plain_heads_loss_and_gradients_are_those_of_whole_logits(head_trains: bool) -> None:
    x, _, head, _, targets = inputs(torch.float64)
    leaves = [tensor.requires_grad_() for tensor in ((x, head) if head_trains else (x,))]
    whole = F.cross_entropy((x @ head.T).flatten(0, 1), targets.flatten(), reduction="sum")
    compare(plain_cross_entropy(x, head, targets), whole, leaves)


def test_a_sequence_that_is_not_distilled_keeps_every_bit_and_without_one_the_loss_does_too() -> (
    None
):
    x, u, base_head, head, targets = inputs(torch.float32)
    u.requires_grad_()

    def loss_and_gradient(distillation: tuple[float, ...] | None) -> tuple[Tensor, Tensor]:
        loss = trained_head_cross_entropy(x, u, base_head, head, targets, distillation=distillation)
        return loss.detach(), torch.autograd.grad(loss, u)[0]

    plain_loss, plain = loss_and_gradient(None)
    loss, gradient = loss_and_gradient((0.0, 0.0, 0.0))
    assert torch.equal(loss, plain_loss) and torch.equal(gradient, plain)
    loss, gradient = loss_and_gradient((0.0, 0.5, 0.0))
    assert loss > plain_loss
    is_same = [torch.equal(one, other) for one, other in zip(gradient, plain, strict=True)]
    assert is_same == [True, False, True]


def test_under_autocast_it_is_as_near_to_float32_as_whole_logits_are() -> None:
    x, u, base_head, head, targets = inputs(torch.float32)
    u.requires_grad_()

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, u)[0]

    exact = gradient(trained_head_cross_entropy(x, u, base_head, head, targets))
    with torch.autocast("cpu", torch.bfloat16):
        chunked = gradient(trained_head_cross_entropy(x, u, base_head, head, targets))
        logits = (F.linear(x, base_head) + F.linear(u, head)).flatten(0, 1).float()
        whole = gradient(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    assert (chunked - exact).norm() <= 1.2 * (whole - exact).norm()
