"""Peak memory of the vocabulary head at the size of Llama-3.2-1B, on fake tensors: shapes without numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.loss.loss_utils import ForCausalLMLoss

from scale_cli.model.head_loss import trained_head_cross_entropy
from scripts.benchmark.counting import peak_bytes

VOCABULARY, NUM_TOKENS, HIDDEN, EXPANSION = 128_256, 8192, 2048, 256


def head_peak_bytes(device: str) -> tuple[int, int]:
    """Return the peak of a head's forward and backward: ours in chunks, and transformers' over whole logits.

    Both are H x + H' u, H frozen in bfloat16, H' trained, at 8,192 tokens and a vocabulary of 128,256.
    """

    def whole(x: Tensor, u: Tensor, base_head: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = x @ base_head.T + u @ head.to(u.dtype).T
        return ForCausalLMLoss(logits, targets, VOCABULARY, shift_labels=targets)

    return _peak(trained_head_cross_entropy, device), _peak(whole, device)


def _peak(loss_of: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor], device: str) -> int:
    with FakeTensorMode():
        x = torch.empty(4, NUM_TOKENS // 4, HIDDEN, dtype=torch.bfloat16, device=device)
        u = torch.empty(4, NUM_TOKENS // 4, EXPANSION, dtype=torch.bfloat16, device=device).requires_grad_()
        base_head = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device)
        head = torch.empty(VOCABULARY, EXPANSION, device=device).requires_grad_()
        targets = torch.zeros(4, NUM_TOKENS // 4, dtype=torch.long, device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(x, u, base_head, head, targets)
            loss.backward()

        return peak_bytes(step)
