"""The speed of a device: measured on products of a base's layer, stated, or a maker's peak."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from scale_cli.config.schema import RunConfig
from scale_cli.planning.memory import step_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.terminal import log

if TYPE_CHECKING:
    from torch import Tensor

# Of the timed layer: it shows the speed of all, in a second or so.
_LENGTH, _MOST_CHANNELS, _MOST_WINDOWS = 128, 1024, 128
_LEAST_STEP_S, _NUM_TIMINGS = 0.05, 5
_IDLE_LOAD = 0.3  # processes that wait for a core, on a machine that is called idle
# FLOP/s of dense 16-bit products, from the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


@dataclass(frozen=True)
class Device:
    """A device, with the speed that a plan's times use."""

    type: str  # `cpu` or `cuda`; `cuda` if the speed is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where flops_per_s comes from, for the terminal
    load: float = 0.0  # how many other processes wanted a core meanwhile
    num_threads: int = 0  # that were measured with; 0 if the speed is stated


def busyness() -> float:
    """Return how many processes have wanted a core in the last minute."""
    return os.getloadavg()[0]


def measure_device(sizes: BaseSizes, mixed_precision: str) -> Device:
    """Measure the speed of training steps of one layer of a base, cut to 1,024 channels.

    The steps grow until one takes a twentieth of a second; the result is the median of several.
    """
    import torch

    load = busyness()
    is_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "1"
    accelerator = None if is_cpu else torch.accelerator.current_accelerator()
    where = torch.device("cpu") if accelerator is None else accelerator
    width = min(sizes.hidden_size, _MOST_CHANNELS)
    head_dim = min(sizes.head_dim, 64)
    num_heads = max(1, width // head_dim)
    channels = min(sizes.intermediate_size, 4 * width)
    shapes = [(num_heads * head_dim, width)] * 3 + [(width, num_heads * head_dim)]
    shapes += [(channels, width)] * 2 + [(width, channels)]
    weights = [torch.randn(shape, device=where).mul_(0.02).requires_grad_() for shape in shapes]
    per_token = 6.0 * sum(weight.numel() for weight in weights)
    per_token += 12.0 * num_heads * head_dim * (_LENGTH + 1) / 2
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)

    def time_step(num_windows: int) -> float:
        x_BTD = torch.ones(num_windows, _LENGTH, width, device=where, requires_grad=True)
        started_s = time.perf_counter()
        with torch.autocast(where.type, dtype, enabled=dtype is not None):
            loss = _layer(x_BTD, weights, num_heads)
        loss.backward()
        if not is_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter() - started_s

    precision = str(dtype or torch.float32).removeprefix("torch.")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    num_threads = torch.get_num_threads() if is_cpu else 0
    log(f"measuring      {name}: training steps of one layer in {precision}")
    time_step(1)  # warm-up
    num_windows = 1
    while time_step(num_windows) < _LEAST_STEP_S and num_windows < _MOST_WINDOWS:
        num_windows *= 2
    elapsed_s = median(time_step(num_windows) for _ in range(_NUM_TIMINGS))
    flops_per_s = per_token * num_windows * _LENGTH / elapsed_s
    origin = f"measured on {name}: steps of one layer in {precision}"
    if is_cpu:
        origin += f", {num_threads} thread{'s' if num_threads > 1 else ''} {in_words(load)}"
    return Device(where.type, flops_per_s, origin, round(load, 1), num_threads)


def in_words(load: float) -> str:
    num_cores = len(os.sched_getaffinity(0))
    if load < _IDLE_LOAD:
        return f"of an idle machine ({num_cores} cores)"
    return f"beside other work (load {load:.1f} on {num_cores} cores); alone it is faster"


def _layer(x_BTD: Tensor, weights: list[Any], num_heads: int) -> Tensor:
    """Return a number that needs every product of a decoder layer."""
    import torch.nn.functional as F

    query, key, value, output, gate, up, down = weights
    q, k, v = (
        F.linear(x_BTD, weight).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for weight in (query, key, value)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x_BTD = x_BTD + F.linear(attended.flatten(2), output)
    written = F.linear(F.silu(F.linear(x_BTD, gate)) * F.linear(x_BTD, up), down)
    return (x_BTD + written).float().sum()


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
