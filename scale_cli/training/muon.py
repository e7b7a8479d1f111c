"""Muon beside AdamW, as one optimiser that leaves everything as it was where a step is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon over some groups of parameters and AdamW over others: their groups and their state are this optimiser's."""

    def __init__(self, muon: WithholdingMuon, adamw: torch.optim.AdamW | None) -> None:
        self._parts: list[Any] = [muon] if adamw is None else [muon, adamw]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Update all parameters; where `found_inf` is set and not 0, none."""
        assert closure is None, "gradients are there already"
        for part in self._parts:
            if (found_inf := getattr(self, "found_inf", None)) is not None:
                part.found_inf = found_inf
            try:
                part.step()
            finally:
                part.__dict__.pop("found_inf", None)


class WithholdingMuon(torch.optim.Muon):
    """Muon that is told as a fused optimiser is, by `found_inf`, to change nothing, and does not wait for the device.

    It steps one matrix after the other, so that no more than one is kept a copy of.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices; where `found_inf` is set and not 0, neither them nor their momentum."""
        assert closure is None, "gradients are there already"
        groups, found_inf = self.param_groups, getattr(self, "found_inf", None)
        try:
            for group in groups:
                for matrix in group["params"]:
                    self.param_groups = [{**group, "params": [matrix]}]
                    self._step_unless(found_inf, matrix)
        finally:
            self.param_groups = groups

    def _step_unless(self, found_inf: Tensor | None, matrix: nn.Parameter) -> None:
        if found_inf is None or matrix.grad is None:
            super().step()
            return
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        before = [(tensor, tensor.clone()) for tensor in (matrix, state["momentum_buffer"])]
        super().step()
        for tensor, kept in before:
            torch.where(found_inf > 0, kept, tensor, out=tensor)
