"""Context parallelism: processes share every window; each has some of its positions and all of its keys.

Each process computes its own queries, products and losses. Attention gathers keys and values; with few key/value heads
they are small compared with a layer's activations. A window is cut into twice as many parts as processes share it.
Process i has part i and the i-th part from the end, so that all processes attend to equally many positions.

Accelerate's ParallelismConfig lays the processes out. Its own attention (torch's ring) has kernels for GPUs only, and
supports neither isolated documents nor sliding windows.

Shapes: B batch, T positions of a window, P parts of it, S positions of a part, N heads, A channels per head.

Source: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, one_line
from scale_cli.upscale.objective import SHARING_WINDOWS


def parallelism(train: TrainConfig, num_processes: int) -> ParallelismConfig:
    """Return the layout of processes: replicas, shards in each, window parts in each; ConfigError if none fits."""
    sharing = train.sharing_windows(num_processes)
    within = num_processes
    if train.sharded_within == "node" and train.sharding != "none":
        if num_processes > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "train.sharded_within node: the launcher does not say how many processes a machine has; "
                "set LOCAL_WORLD_SIZE, or start with torchrun or `accelerate launch`"
            )
        within = min(int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)), num_processes)
    try:
        return ParallelismConfig(
            dp_replicate_size=num_processes // within,
            dp_shard_size=within // sharing,
            cp_size=sharing,
        )
    except ValueError as error:
        given = f"train.context_parallel {sharing}, train.sharded_within {train.sharded_within}"
        raise ConfigError(
            f"{given}: impossible on {num_processes} processes, {within} per machine: {one_line(error)}"
        ) from None


def share_windows(mesh: DeviceMesh, *, isolated: bool) -> str:
    """Register attention over all parts of a window, and return its name in transformers."""
    AttentionInterface.register(
        SHARING_WINDOWS, partial(attend_over_parts, mesh["cp"].get_group(), isolated)
    )
    return SHARING_WINDOWS


class _GatheredParts(torch.autograd.Function):
    """Stack the tensors of all processes of a group; backward, each gets the sum of all gradients of its tensor."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, own: Tensor) -> Tensor:
        ctx.group = group
        everyone = own.new_empty(group.size(), *own.shape)
        dist.all_gather(list(everyone), own.contiguous(), group=group)
        return everyone

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(own, list(grad.contiguous()), group=ctx.group)
        return None, own


def _of_all_positions(group: dist.ProcessGroup, own_BNSA: Tensor) -> Tensor:
    """Return (B, N, T, A), in the window's order, gathered from every process's two parts."""
    gathered = _GatheredParts.apply(group, own_BNSA)
    early, late = gathered.unflatten(3, (2, -1)).unbind(3)
    return torch.cat([early, late.flip(0)]).movedim(0, 2).flatten(2, 3)


def attend_over_parts(
    group: dist.ProcessGroup,
    isolated: bool,
    attention: Any,
    q_BNSA: Tensor,
    k_BNSA: Tensor,
    v_BNSA: Tensor,
    _mask: None,
    *,
    position_ids: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with transformers' interface: a position sees its document up to itself."""
    rank, num_processes = group.rank(), group.size()
    keys, values = _of_all_positions(group, torch.cat([k_BNSA, v_BNSA], dim=1)).chunk(2, dim=1)
    size = q_BNSA.shape[2] // 2
    attended = []
    for part, own in ((rank, slice(size)), (2 * num_processes - 1 - rank, slice(size, None))):
        begin, end = part * size, (part + 1) * size
        seen = q_BNSA[:, :, own], keys[:, :, :end], values[:, :, :end]
        looks_over_all = not isolated and (sliding_window is None or sliding_window >= end)
        if looks_over_all and q_BNSA.is_cuda:  # CUDA kernels need no mask
            grouped = q_BNSA.shape[1] != k_BNSA.shape[1]
            bias = causal_lower_right(size, end)
            attended.append(
                F.scaled_dot_product_attention(
                    *seen, attn_mask=bias, scale=scaling, enable_gqa=grouped
                )
            )
            continue
        mask = _visible(position_ids[:, own], begin, sliding_window)
        part_BSNA, _ = sdpa_attention_forward(attention, *seen, mask, scaling=scaling, **kwargs)
        attended.append(part_BSNA.transpose(1, 2))
    return torch.cat(attended, dim=2).transpose(1, 2), None


def _visible(position_ids_BS: Tensor, begin: int, sliding_window: int | None) -> Tensor:
    """Return the mask (B, 1, S, keys) of a part at `begin` in its window; positions count from a document's start."""
    end = begin + position_ids_BS.shape[1]
    places = torch.arange(end, device=position_ids_BS.device)
    back = (
        position_ids_BS if sliding_window is None else position_ids_BS.clamp(max=sliding_window - 1)
    )
    own_S1 = places[begin:, None]
    return ((places <= own_S1) & (places >= own_S1 - back.unsqueeze(-1))).unsqueeze(1)
