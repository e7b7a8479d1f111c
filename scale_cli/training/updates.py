"""How far the optimiser's step moves what trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from scale_cli.training.sharding import whole_tensor


@contextmanager
def measured_update_norm(optimiser: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Yield a list that a step within appends its update's norm to, without waiting for the device.

    While it steps a copy of what trains is held, where the activations of its backward pass were.
    """
    norms: list[Tensor] = []
    before: list[Tensor] = []
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def keep(*_: Any) -> None:
        before.extend(parameter.detach().clone() for parameter in parameters)

    @torch.no_grad()
    def measure(*_: Any) -> None:
        torch._foreach_sub_(before, parameters)
        norms.append(whole_tensor(torch.nn.utils.get_total_norm(before)))
        before.clear()

    hooks = optimiser.register_step_pre_hook(keep), optimiser.register_step_post_hook(measure)
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
