"""How fast a device trains, as a step of the base's own shapes shows or its maker says; its name and peak memory."""

from __future__ import annotations

import copy
import re
import resource
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.planning.counting import count_flops, model_without_weights
from scale_cli.processes import device as own_device
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.method import build_model
from scale_cli.upscale.objective import for_training

# Of the base, in a step that is timed: it tells the speed of all layers, and takes little time and memory.
_LAYERS, _VOCABULARY, _LENGTH = 1, 2048, 128
_LEAST_STEP_S, _MOST_WINDOWS = 0.1, 128
_NUM_TIMINGS = 9
# Dense bf16 products, FLOP/s, by the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


@dataclass(frozen=True)
class Device:
    """What a time is computed with."""

    type: str  # `cpu` or `cuda`; `cuda` for a device that is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where flops_per_s comes from, for the terminal


def measure_device(base_config: Any, dtype: str, mixed_precision: str) -> Device:
    """Measure the device at hand by forward and backward passes of a widened model with one of the base's layers.

    They grow until one takes a tenth of a second, and the median of several is taken.
    """
    where = own_device()
    with torch.device("meta"):
        model: Any = build_model(base_without_weights(_one_layer(base_config), dtype), MethodConfig(), seed=0)
    flops = count_flops(model, _LENGTH).total(_LENGTH)
    model.to_empty(device=where)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.fill_(1)
    trained: Any = for_training(model.train(), TrainConfig(max_steps=1))

    def time_step(num_windows: int) -> float:
        ids = torch.zeros(num_windows, _LENGTH, dtype=torch.long, device=where)
        started_s = time.perf_counter()
        with torch.autocast(where.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
            output = trained(
                input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=ids.numel(), use_cache=False
            )
        output.loss.backward()
        model.zero_grad(set_to_none=True)
        if where.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started_s

    time_step(1)  # what is set up once is not timed
    num_windows = 1
    while time_step(num_windows) < _LEAST_STEP_S and num_windows < _MOST_WINDOWS:
        num_windows *= 2
    elapsed_s = median(time_step(num_windows) for _ in range(_NUM_TIMINGS))
    precision = "bfloat16" if mixed_precision == "bf16" else "float32"
    measured = f"measured on {device_name(where)}: steps of one layer in {precision}"
    return Device(where.type, flops * num_windows * _LENGTH / elapsed_s, measured)


def _one_layer(base_config: Any) -> Any:
    config = copy.deepcopy(base_config)
    config.num_hidden_layers = _LAYERS
    config.vocab_size = min(config.vocab_size, _VOCABULARY)
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:_LAYERS]
    return config


def peak_tokens_per_s(config: RunConfig, device_name: str, num_processes: int) -> float | None:
    """Return the tokens a second that a run could train on if its devices did nothing but its products.

    At their makers' figures; None where none is known. What training reaches of it is its MFU.
    """
    peak = peak_flops_per_s(device_name, config.train.mixed_precision)
    if peak is None:
        return None
    length = config.corpus.sequence_length
    return num_processes * peak / count_flops(model_without_weights(config), length).total(length)


def peak_flops_per_s(device_name: str, mixed_precision: str) -> float | None:
    """Return what a device's maker says it can do in the run's precision; None where no figure is known."""
    if mixed_precision != "bf16":
        return None
    peaks = _PEAK_FLOPS_PER_S.items()
    return next((peak for name, peak in peaks if re.search(rf"\b{name}\b(?! NVL)", device_name)), None)


def device_name(device: torch.device) -> str:
    """Return what a GPU is called; of anything else, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was taken so far: of a GPU by this process, else of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
