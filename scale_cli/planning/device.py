"""The speed of a device: measured on a base's layer and head, stated, or a maker's peak."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from scale_cli.config.schema import RunConfig
from scale_cli.planning.memory import step_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.terminal import log

if TYPE_CHECKING:
    from torch import Tensor

# Of what is timed: it shows the speed of all, in half a second or so.
_LENGTH = 128
_MOST_CHANNELS = 1024
_MOST_HEAD_DIM = 64
_MOST_ROWS = 8192
_MOST_WINDOWS = 128
_LEAST_STEP_S = 0.05
_NUM_TIMINGS = 5
_IDLE_LOAD = 0.3  # processes that wait for a core, on a machine that is called idle
# FLOP/s of dense 16-bit products, from the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


@dataclass(frozen=True)
class Device:
    """A device, with the speed that a plan's times use."""

    type: str  # `cpu` or `cuda`; `cuda` if the speed is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where flops_per_s comes from, for the terminal
    load: float = 0.0  # how many processes wanted a core meanwhile
    num_threads: int = 0  # that were measured with; 0 if the speed is stated


def busyness() -> float:
    """Return how many processes have wanted a core in the last minute."""
    return os.getloadavg()[0]


def measure_device(sizes: BaseSizes, mixed_precision: str) -> Device:
    """Measure the speed of training steps of one layer and of the head, cut to 1,024 channels.

    A whole step is taken to spend its FLOPs at these two speeds. Each is the median of several
    steps, which grow until one takes a twentieth of a second.
    """
    import torch

    load = busyness()
    is_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "1"
    accelerator = None if is_cpu else torch.accelerator.current_accelerator()
    where = torch.device("cpu") if accelerator is None else accelerator
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    precision = str(dtype or torch.float32).removeprefix("torch.")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    # Other work does not change the time that a processor spends; what waits for a device counts.
    num_threads = torch.get_num_threads() if is_cpu else 0
    clock = time.process_time if is_cpu else time.perf_counter
    log(f"measuring      {name}: training steps of one layer and the head in {precision}")

    def speed_of(loss_of: Callable[[Tensor], Tensor], flops_per_token: float) -> float:
        def time_step(num_windows: int) -> float:
            x_BTD = torch.ones(num_windows, _LENGTH, width, device=where, requires_grad=True)
            started_s = clock()
            with torch.autocast(where.type, dtype, enabled=dtype is not None):
                loss = loss_of(x_BTD)
            loss.backward()
            if not is_cpu:
                torch.accelerator.synchronize()
            return (clock() - started_s) / max(num_threads, 1)

        time_step(1)  # warm-up
        num_windows = 1
        while time_step(num_windows) < _LEAST_STEP_S and num_windows < _MOST_WINDOWS:
            num_windows *= 2
        elapsed_s = median(time_step(num_windows) for _ in range(_NUM_TIMINGS))
        return flops_per_token * num_windows * _LENGTH / elapsed_s

    width = min(sizes.hidden_size, _MOST_CHANNELS)
    head_dim = min(sizes.head_dim, _MOST_HEAD_DIM)
    num_heads = max(1, width // head_dim)
    channels = min(sizes.intermediate_size, 4 * width)
    num_rows = min(sizes.vocab_size, _MOST_ROWS)
    shapes = [(num_heads * head_dim, width)] * 3 + [(width, num_heads * head_dim)]
    shapes += [(channels, width)] * 2 + [(width, channels), (num_rows, width)]
    *weights, head = [
        torch.randn(shape, device=where).mul_(0.02).requires_grad_() for shape in shapes
    ]
    of_attention = 12.0 * num_heads * head_dim * (_LENGTH + 1) / 2
    of_layer = 6.0 * sum(weight.numel() for weight in weights) + of_attention
    layer_speed = speed_of(lambda x_BTD: _layer(x_BTD, weights, num_heads), of_layer)
    head_speed = speed_of(lambda x_BTD: _head(x_BTD, head), 6.0 * head.numel())

    of_heads = 2 * sizes.head_dim * (sizes.num_attention_heads + sizes.num_key_value_heads)
    in_layers = (
        sizes.num_hidden_layers * sizes.hidden_size * (of_heads + 3 * sizes.intermediate_size)
    )
    in_head = sizes.hidden_size * sizes.vocab_size
    flops_per_s = (in_layers + in_head) / (in_layers / layer_speed + in_head / head_speed)
    origin = f"measured on {name}: steps of one layer and the head in {precision}"
    if is_cpu:
        origin += f", {num_threads} thread{'s' if num_threads > 1 else ''} {in_words(load)}"
    return Device(where.type, flops_per_s, origin, round(load, 1), num_threads)


def in_words(load: float) -> str:
    num_cores = len(os.sched_getaffinity(0))
    if load < _IDLE_LOAD:
        return f"of an idle machine ({num_cores} cores)"
    return f"alone; other work (load {load:.1f} on {num_cores} cores) makes it slower"


def _layer(x_BTD: Tensor, weights: list[Tensor], num_heads: int) -> Tensor:
    """Return a number that needs every product of a decoder layer, and its norms and rotations."""
    import torch
    import torch.nn.functional as F

    query, key, value, output, gate, up, down = weights
    width = x_BTD.shape[-1:]
    normed = F.rms_norm(x_BTD, width)
    q, k, v = (
        F.linear(normed, weight).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for weight in (query, key, value)
    )
    q, k = (of + torch.cat([-of, of], -1)[..., : of.shape[-1]] * 0.5 for of in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x_BTD = x_BTD + F.linear(attended.flatten(2), output)
    normed = F.rms_norm(x_BTD, width)
    written = F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
    return (x_BTD + written).float().sum()


def _head(x_BTD: Tensor, weight: Tensor) -> Tensor:
    """Return the cross-entropy of the first token everywhere."""
    import torch
    import torch.nn.functional as F

    logits = F.linear(x_BTD, weight).float().flatten(0, 1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def peak_tokens_per_s(
    config: RunConfig, sizes: BaseSizes, named: str, num_processes: int, num_new: int = 0
) -> float | None:
    """Return the tokens per second that a run could train on if its devices did nothing but products.

    It uses the makers' figures; None if none is known. The share that training reaches is its MFU.
    """
    peak = peak_flops_per_s(named, config.train.mixed_precision)
    if peak is None or not config.method.definition.is_planned:
        return None
    step = step_of(config, sizes, num_new=num_new)
    return num_processes * peak / step.flops(config.corpus.sequence_length)


def peak_flops_per_s(named: str, mixed_precision: str) -> float | None:
    """Return the FLOP/s that a maker states for the run's precision; None if no figure is known."""
    if mixed_precision not in ("bf16", "fp16"):
        return None
    known = (
        peak for name, peak in _PEAK_FLOPS_PER_S.items() if re.search(rf"\b{name}\b(?! NVL)", named)
    )
    return next(known, None)
