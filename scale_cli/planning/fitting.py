"""Sizes of a run that fit a device's memory, the time there is, and the text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.planning.counting import count_flops, count_saved_tensors
from scale_cli.planning.memory import Parameters, training_memory
from scale_cli.planning.speed import Device, measure_device
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.method import NewPieces, build_model

_LENGTHS = (2048, 1024, 512, 256, 128, 64)
# A step of fewer tokens is noise; a schedule of fewer steps is none, where the time allows more.
MIN_STEP_TOKENS, _MAX_STEP_TOKENS, _MIN_BATCH_SIZE = 2048, 131_072, 8
_MIN_STEPS, _WANTED_STEPS, _MAX_STEPS = 10, 100, 100_000
# Four readings of a text teach nearly what new text would (Muennighoff et al., arXiv 2305.16264).
MOST_READINGS = 4
# The rest is for the allocator, the data, the evaluation, and whoever else uses the machine.
_MEMORY_SHARE = {"cpu": 0.5}
_MEMORY_SHARE_OF_OTHERS = 0.8


@dataclass(frozen=True)
class Sizes:
    """What fits."""

    device: Device
    mixed_precision: str
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    minutes: float  # that its steps take, at the device's speed
    memory_bytes: int
    available_bytes: int

    @property
    def num_tokens(self) -> int:
        """Of the run."""
        return self.max_steps * self.global_batch_size * self.sequence_length


def fitting_sizes(base_config: Any, method: MethodConfig, num_new: int, minutes: float, num_tokens: int) -> Sizes:
    """Return the longest windows, and the most at once, that the device holds and of which there is time for many.

    Steps are as many as there is time for, and as read the text, of `num_tokens`, four times.
    """
    devices = {precision: measure_device(base_config, "float32", precision) for precision in ("no", "bf16")}
    mixed_precision = max(devices, key=lambda precision: devices[precision].flops_per_s)
    device, available = devices[mixed_precision], _memory_bytes(devices[mixed_precision].type)
    with torch.device("meta"):
        new = NewPieces.unknown(num_new) if num_new else None
        model = build_model(base_without_weights(base_config, "float32"), method, 0, new)
    settings = {"max_steps": 1, "mixed_precision": mixed_precision}
    parameters = Parameters.of(model, TrainConfig.model_validate(settings))
    flops, saved = count_flops(model, _LENGTHS[-1]), count_saved_tensors(model, mixed_precision)

    def memory(length: int, at_once: int) -> int:
        batch = {"global_batch_size": at_once, "micro_batch_size": at_once}
        return training_memory(
            parameters,
            saved,
            TrainConfig.model_validate(settings | batch),
            sequence_length=length,
            vocab_size=base_config.vocab_size + num_new,
            num_processes=1,
            device_type=device.type,
            distils=method.distils,
        ).total

    def tokens_of_run(length: int) -> float:
        return min(60 * minutes * device.flops_per_s / flops.total(length), MOST_READINGS * num_tokens)

    step_tokens = min(max(tokens_of_run(_LENGTHS[-1]) / _WANTED_STEPS, MIN_STEP_TOKENS), _MAX_STEP_TOKENS)
    longest = min(base_config.max_position_embeddings, step_tokens // _MIN_BATCH_SIZE)
    lengths = [length for length in _LENGTHS if length <= longest and memory(length, 1) <= available]
    if not lengths:
        needed = memory(_LENGTHS[-1], 1)
        raise ConfigError(f"--base: needs {gib(needed)} to be trained, and {device.type} has {gib(available)} for it")
    length = lengths[0]
    batch_size = 2 ** int(step_tokens / length).bit_length() // 2
    at_once = batch_size
    while at_once > 1 and memory(length, at_once) > available:
        at_once //= 2
    steps = min(max(_MIN_STEPS, int(tokens_of_run(length) / (batch_size * length))), _MAX_STEPS)
    takes = steps * batch_size * length * flops.total(length) / device.flops_per_s / 60
    sizes = (length, batch_size, at_once, steps, takes)
    return Sizes(device, mixed_precision, *sizes, memory(length, at_once), available)


def _memory_bytes(device_type: str) -> int:
    """Return what a run may hold: a share of a CPU's whole memory, or of what is free on any other device."""
    if device_type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory, _ = torch.accelerator.get_memory_info()
    return int(memory * _MEMORY_SHARE.get(device_type, _MEMORY_SHARE_OF_OTHERS))


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"
