"""A step that is computed as well as counted: a device's speed is measured on it.

The same walk that counts a run's operations (`walk.py`) calls these ones on a small model of random weights.

Shapes: B batch, T positions, C channels of a stream, A of a head, V vocabulary, N positions of all windows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import Step, Value, Weights


class MeasuredStep(Step):
    """Computes the loss and the gradients of some windows; `start` begins the next step."""

    def __init__(
        self,
        sizes: BaseSizes,
        device: torch.device,
        batch: tuple[int, int],  # windows, and positions of each
        rows_at_once: int,  # whose logits exist together
        lowered: int | None,
    ) -> None:
        super().__init__(sizes, lowered)
        self.device = device
        self.batch = batch
        self.rows_at_once = rows_at_once
        self.weights: list[Tensor] = []  # in the order of the walk
        self.num_used = 0
        self.angles_TA = torch.full((batch[1], sizes.head_dim), 0.7, device=device)

    def start(self) -> None:
        """Begin a step."""
        self.num_used = 0
        self.kept.clear()
        for weight in self.weights:
            weight.grad = None

    def weight(self, rows: int, columns: int, trains: bool) -> Tensor:
        """Return a matrix: every step uses the same ones, in the same order."""
        if self.num_used == len(self.weights):
            weight = torch.full((rows, columns), 0.01, device=self.device, requires_grad=trains)
            self.weights.append(weight)
        self.num_used += 1
        return self.weights[self.num_used - 1]

    def embed(self, width: int, itemsize: int, needs_grad: bool) -> Value:
        x = super().embed(width, itemsize, needs_grad)
        x.tensor = torch.ones(*self.batch, width, device=self.device, requires_grad=needs_grad)
        return x

    def linear(self, x: Value, width: int, weights: Weights, **held: Any) -> Value:
        y = super().linear(x, width, weights, **held)
        y.tensor = F.linear(x.tensor, self.weight(width, x.width, weights.train))
        return y

    def norm(self, x: Value, weights: Weights, *, times: int = 1) -> Value:
        y = super().norm(x, weights, times=times)
        parts = x.tensor.unflatten(-1, (times, -1))
        y.tensor = (parts * _inverse_rms(parts)).flatten(-2)
        return y

    def widened_norm(self, x: Value, u: Value, base_itemsize: int) -> tuple[Value, Value]:
        normed = super().widened_norm(x, u, base_itemsize)
        inverse_BT1 = _inverse_rms(x.tensor)
        for of, stream in zip(normed, (x, u), strict=True):
            of.tensor = stream.tensor * inverse_BT1
        return normed

    def attend(self, q: Value, k: Value, v: Value, **how: Any) -> Value:
        """Rotate q and k too, which costs no products."""
        heads = super().attend(q, k, v, **how)
        q_BNTA, k_BNTA, v_BNTA = (
            of.tensor.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for of in (q, k, v)
        )
        attended = F.scaled_dot_product_attention(
            self._rotated(q_BNTA),
            self._rotated(k_BNTA),
            v_BNTA,
            is_causal=True,
            enable_gqa=True,
        )
        heads.tensor = attended.transpose(1, 2).flatten(2)
        return heads

    def _rotated(self, x_BNTA: Tensor) -> Tensor:
        left, right = x_BNTA.chunk(2, dim=-1)
        return x_BNTA * self.angles_TA + torch.cat([-right, left], dim=-1) * self.angles_TA

    def gate(self, gate: Value, up: Value, *, fused: bool) -> Value:
        channels = super().gate(gate, up, fused=fused)
        channels.tensor = F.silu(gate.tensor) * up.tensor
        return channels

    def cross_entropy(self, streams: list[tuple[Value, int, Weights]]) -> None:
        """Compute the loss in chunks of tokens, as `model/head_loss.py` does, and go back to the embedding."""
        super().cross_entropy(streams)
        read: list[Tensor] = []
        heads: list[Tensor] = []
        for x, num_rows, weights in streams:
            read.append(x.tensor.detach().flatten(0, 1).requires_grad_(x.needs_grad))
            head = self.weight(num_rows, x.width, weights.train)
            heads.append(head if weights.train or not self.lowered else head.to(torch.bfloat16))
        for chunk in zip(*(x_NC.split(self.rows_at_once) for x_NC in read), strict=True):
            logits_NV: Any = sum(F.linear(*of) for of in zip(chunk, heads, strict=True))
            targets_N = torch.zeros(len(logits_NV), dtype=torch.long, device=self.device)
            F.cross_entropy(logits_NV.float(), targets_N).backward()
        ends: list[Tensor] = [x.tensor for x, _, _ in streams if x.needs_grad]
        grads: list[Any] = [x_NC.grad for x_NC in read if x_NC.requires_grad]
        shaped = [grad.view_as(end) for grad, end in zip(grads, ends, strict=True)]
        torch.autograd.backward(ends, shaped)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
