"""Cross-entropy of the adaptation head in chunks: the (tokens x vocabulary) logits never exist whole.

Shapes: N tokens, D base channels, E expansion channels, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100

# Logits of one chunk, in elements: about what a CPU's caches hold, and enough rows to fill a GPU (256 MiB in float32).
_LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}


def rows_at_once(device_type: str, vocab_size: int) -> int:
    """Return how many tokens' logits one chunk holds."""
    return max(1, _LOGITS_AT_ONCE.get(device_type, 2**26) // vocab_size)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log p(target), with the gradients computed chunk by chunk on the way forward.

    Only H', u and (where a layer collaborates) x get gradients; H is frozen and gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, u_NE: Tensor, base_head_VD: Tensor, head_VE: Tensor, targets_N: Tensor
    ) -> Tensor:
        device = x_ND.device.type
        # Asked first: the meta device, on which a run is planned, knows no autocast.
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else head_VE.dtype
        base_head, head = base_head_VD.to(dtype), head_VE.to(dtype)
        x_wanted, u_wanted, _, head_wanted, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x_ND) if x_wanted else None
        grad_u = torch.empty_like(u_NE) if u_wanted else None
        grad_head = torch.zeros_like(head_VE, dtype=torch.float32) if head_wanted else None
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        num_rows = rows_at_once(device, len(head))
        for start in range(0, len(targets_N), num_rows):
            rows = slice(start, start + num_rows)
            x, u, targets = x_ND[rows].to(dtype), u_NE[rows].to(dtype), targets_N[rows]
            logits_NV = (x @ base_head.T).float().add_(u @ head.T)
            counted = targets != IGNORED
            places = targets.where(counted, 0).unsqueeze(1)
            log_sums = torch.logsumexp(logits_NV, dim=1)
            said = logits_NV.gather(1, places).squeeze(1) - log_sums
            loss -= torch.where(counted, said, 0.0).sum()
            if not (x_wanted or u_wanted or head_wanted):
                continue
            # d loss / d logits = softmax - one-hot, and nothing where there is no target; in place, in one chunk.
            grad_NV = logits_NV.sub_(log_sums.unsqueeze(1)).exp_()
            grad_NV.scatter_add_(1, places, torch.full_like(places, -1, dtype=grad_NV.dtype))
            grad_NV = grad_NV.mul_(counted.unsqueeze(1)).to(dtype)
            if grad_x is not None:
                grad_x[rows] = grad_NV @ base_head
            if grad_u is not None:
                grad_u[rows] = grad_NV @ head
            if grad_head is not None:
                grad_head += grad_NV.T @ u
        ctx.save_for_backward(grad_x, grad_u, None if grad_head is None else grad_head.to(head_VE.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_x, grad_u, grad_head = (None if grad is None else grad * scale for grad in ctx.saved_tensors)
        return grad_x, grad_u, None, grad_head, None


def adaptation_cross_entropy(
    x_BTD: Tensor, u_BTE: Tensor, base_head_VD: Tensor, head_VE: Tensor, targets_BT: Tensor
) -> Tensor:
    """Return the summed cross-entropy of H x + H' u in float32, IGNORED targets left out.

    Args:
        x_BTD: the base stream after its last norm.
        u_BTE: the expansion stream after its last norm.
        base_head_VD: H; frozen, it gets no gradient.
        head_VE: H'.
        targets_BT: the token after each position, or IGNORED.
    """
    return _ChunkedCrossEntropy.apply(
        x_BTD.flatten(0, 1), u_BTE.flatten(0, 1), base_head_VD.detach(), head_VE, targets_BT.flatten()
    )
