"""Keeping weights near where they began: lookahead, decay to the base, OSF (by the directions it leaves), bounds of E'.

Lookahead (Zhang et al. 2019, https://arxiv.org/abs/1907.08610): every k steps theta becomes
slow + share (theta - slow), slow being what that made of it k steps before. With replay that is MER, replay and
Reptile, as continual pre-training has it (https://arxiv.org/abs/2508.01908). The optimiser's moments go on as they are.

Decay to the base (L2-SP, Li et al. 2018, https://arxiv.org/abs/1802.01483), decoupled as AdamW's decay is: each step
begins with theta - lr wd (theta - theta_0), wd being `train.weight_decay`.

OSF (https://arxiv.org/abs/2504.07097) trains matrices outside their largest singular directions. PEFT projects the
gradients, but an optimiser's update of projected gradients is not projected: so what it has made of them is, each step.

Bounds of E' are ours (docs/training.md): no row of it grows beyond the rms that it started with. u is divided by rms(x)
and never by its own, so that the rows of frequent tokens, which grow most, would be seen larger at every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scale_cli.config.training import TrainConfig
from scale_cli.training.optimiser import BOUNDED, PROJECTED, START, trainable_parameters
from scale_cli.training.sharding import local_part

SLOW = "slow"


def keeps_slow_weights(train: TrainConfig, num_steps: int) -> bool:
    """Return whether lookahead keeps slow weights beside the moments after some steps: a checkpoint holds them then."""
    return train.lookahead is not None and num_steps % train.lookahead.every_steps > 0


@contextmanager
def lookahead(optimiser: torch.optim.Optimizer, step: int, train: TrainConfig) -> Iterator[None]:
    """Around the update of a step (0 is the first): keep the slow weights, and where it is the k-th go back to them.

    The slow weights are part of the optimiser's state, so they are saved, sharded and resumed as the moments are; they
    begin anew with every k steps.
    """
    if train.lookahead is None:
        yield
        return
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    first = not keeps_slow_weights(train, step)
    begun = [parameter.detach().clone() for parameter in parameters] if first else []
    yield
    if first:  # only now: to an optimiser a parameter of any state is one that has its moments
        for parameter, slow in zip(parameters, begun, strict=True):
            optimiser.state[parameter][SLOW] = slow
    if not keeps_slow_weights(train, step + 1):
        for parameter in parameters:
            slow, fast = (local_part(t.detach()) for t in (optimiser.state[parameter].pop(SLOW), parameter))
            fast.copy_(slow.lerp(fast, train.lookahead.share))


def start_to_decay_to(model: nn.Module, train: TrainConfig) -> dict[str, Tensor]:
    """Return a copy of what trains, by name, of a model at its start; nothing where nothing decays to it."""
    if not train.decay_to_base:
        return {}
    return {name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()}


@torch.no_grad()
def decay_to_start(optimiser: torch.optim.Optimizer, weight_decay: float, finite: Tensor) -> None:
    """Move every group that has a start towards it, by its rate; nowhere where a step is not finite."""
    for group in optimiser.param_groups:
        if START in group:
            share = finite * (group["lr"] * weight_decay)
            for parameter, start in zip(group["params"], group[START], strict=True):
                parameter.lerp_(start, share)


@torch.no_grad()
def project_osf_factors(optimiser: torch.optim.Optimizer, finite: Tensor) -> None:
    """Take out of the factors that OSF trains what has come into the kept directions; nothing where not finite."""
    for group in optimiser.param_groups:
        for parameter in group.get(PROJECTED, ()):
            projected = parameter.detach()
            assert parameter._backward_hooks, "PEFT's own projection, which is linear: it serves for values too"
            for of_gradient in parameter._backward_hooks.values():
                projected = of_gradient(projected)
            parameter.copy_(torch.where(finite, projected, parameter))


@torch.no_grad()
def bound_rows(optimiser: torch.optim.Optimizer, finite: Tensor) -> None:
    """Shrink every row that has grown beyond its bound to it; nothing where not finite."""
    for group in optimiser.param_groups:
        parameters, bound = group.get(BOUNDED, ((), None))
        for parameter in parameters:
            rows = local_part(parameter.detach())  # a sharded tensor is split by rows
            shares = (bound / rows.float().pow(2).mean(dim=-1, keepdim=True).sqrt()).clamp(max=1.0)
            rows.mul_(torch.where(finite, shares, 1.0))
