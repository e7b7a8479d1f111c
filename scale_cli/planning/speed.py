"""How fast a device is taken to train: as stated, or as steps of a few of the base's layers show."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.planning.counting import count_flops
from scale_cli.planning.device import device_name
from scale_cli.processes import device as own_device
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.method import build_model
from scale_cli.upscale.objective import for_training

# Of the base, in a step that is timed: it tells the speed of all layers, and takes little time and memory.
_LAYERS, _VOCABULARY, _LENGTH = 2, 8192, 128
_LEAST_STEP_S, _MOST_WINDOWS = 0.1, 128
_NUM_TIMINGS = 9


@dataclass(frozen=True)
class Device:
    """What a time is computed with."""

    type: str  # `cpu` or `cuda`; `cuda` for a device that is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where flops_per_s comes from, for the terminal


def measured_device(base_config: Any, mixed_precision: str) -> Device:
    """Measure the device at hand by forward and backward passes of a widened model with two of the base's layers.

    They grow until one takes a tenth of a second, and the median of several is taken.
    """
    where = own_device()
    with torch.device("meta"):
        model: Any = build_model(base_without_weights(_few_layers(base_config), "float32"), MethodConfig(), seed=0)
    flops = count_flops(model, _LENGTH).total(_LENGTH)
    model.to_empty(device=where)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.fill_(1)
    trained: Any = for_training(model.train(), TrainConfig(max_steps=1))

    def step(num_windows: int) -> float:
        ids = torch.zeros(num_windows, _LENGTH, dtype=torch.long, device=where)
        with torch.autocast(where.type, torch.bfloat16, enabled=mixed_precision == "bf16"):
            output = trained(
                input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=ids.numel(), use_cache=False
            )
        output.loss.backward()
        model.zero_grad(set_to_none=True)
        if where.type != "cpu":
            torch.accelerator.synchronize()
        return flops * ids.numel()

    step(1)  # what is set up once is not timed
    num_windows = 1
    while _elapsed_s(step, num_windows) < _LEAST_STEP_S and num_windows < _MOST_WINDOWS:
        num_windows *= 2
    elapsed_s = median(_elapsed_s(step, num_windows) for _ in range(_NUM_TIMINGS))
    precision = "bfloat16" if mixed_precision == "bf16" else "float32"
    measured = f"measured on {device_name(where)}: steps of {_LAYERS} layers in {precision}"
    return Device(where.type, flops * num_windows * _LENGTH / elapsed_s, measured)


def _elapsed_s(step: Callable[[int], object], num_windows: int) -> float:
    started_s = time.perf_counter()
    step(num_windows)
    return time.perf_counter() - started_s


def _few_layers(base_config: Any) -> Any:
    config = copy.deepcopy(base_config)
    config.num_hidden_layers = min(config.num_hidden_layers, _LAYERS)
    config.vocab_size = min(config.vocab_size, _VOCABULARY)
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config
