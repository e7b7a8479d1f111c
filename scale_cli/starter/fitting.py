"""Sizes of a first run: the longest windows, and the largest micro-batch, that fit the device and the time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.planning.device import Device
from scale_cli.planning.memory import memory_of
from scale_cli.planning.step import StepCost

MIN_STEPS = 10
LEAST_STEP_TOKENS = 2048  # a step of fewer is too noisy
_MOST_STEP_TOKENS = 131_072
_LENGTHS = (2048, 1024, 512, 256, 128, 64)
_LEAST_BATCH_SIZE = 8
_WANTED_STEPS = 100  # a schedule of fewer is too short, if there is time for more
_MOST_STEPS = 100_000
# Readings of a text; they teach nearly as much as new text (Muennighoff et al., arXiv 2305.16264).
MOST_READINGS = 4
# Of memory; the rest is for data, evaluation and other processes.
_SHARE_OF_HOST = 0.5
_SHARE_OF_DEVICE = 0.8


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run that fit the device and the time."""

    mixed_precision: str
    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    memory_bytes: int
    available_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.max_steps * self.global_batch_size * self.sequence_length


def fit_sizes(
    step: StepCost,
    num_positions: int,
    method: MethodConfig,
    device: Device,
    *,
    mixed_precision: str,
    training_s: float,
    num_tokens: int,
) -> Sizes:
    """Return sizes that leave time for many steps.

    Args:
        step: what a step costs.
        num_positions: of the base.
        method: what trains.
        device: with the speed of training in `mixed_precision`.
        mixed_precision: no, bf16 or fp16.
        training_s: seconds of training.
        num_tokens: of the text, which is read four times at the most.

    Raises:
        ConfigError: the base does not fit the memory.
    """
    check_room(step, method, device.type)
    available = _memory_bytes(device.type)

    def memory(length: int, at_once: int) -> int:
        train = _one_step(method, at_once)
        return memory_of(step, method, train, length, device_type=device.type).total

    most_tokens = MOST_READINGS * num_tokens
    step_tokens = (
        min(training_s * device.flops_per_s / step.flops(_LENGTHS[-1]), most_tokens) / _WANTED_STEPS
    )
    step_tokens = min(max(step_tokens, LEAST_STEP_TOKENS), _MOST_STEP_TOKENS)
    longest = min(num_positions, step_tokens // _LEAST_BATCH_SIZE)
    fitting = (of for of in _LENGTHS if of <= longest and memory(of, 1) <= available)
    length = next(fitting, int(longest))
    batch_size = at_once = 2 ** int(step_tokens / length).bit_length() // 2
    while at_once > 1 and memory(length, at_once) > available:
        at_once //= 2
    step_s = device.step_s(step, _one_step(method, batch_size), length)
    num_steps = int(min(training_s / step_s, most_tokens / (batch_size * length)))
    return Sizes(
        mixed_precision=mixed_precision,
        sequence_length=length,
        global_batch_size=batch_size,
        micro_batch_size=at_once,
        max_steps=min(max(MIN_STEPS, num_steps), _MOST_STEPS),
        memory_bytes=memory(length, at_once),
        available_bytes=available,
    )


def check_room(step: StepCost, method: MethodConfig, device_type: str) -> None:
    """Raise ConfigError if the smallest step does not fit the memory."""
    train = _one_step(method, 1)
    needed = memory_of(step, method, train, _LENGTHS[-1], device_type=device_type).total
    if needed > (available := _memory_bytes(device_type)):
        raise ConfigError(
            f"--base: training needs {needed / 2**30:.1f} GiB, but {device_type} has "
            f"{available / 2**30:.1f} GiB available; choose a smaller base"
        )


def _one_step(method: MethodConfig, batch_size: int) -> TrainConfig:
    sizes = {"max_steps": 1, "global_batch_size": batch_size}
    return TrainConfig.model_validate({**method.definition.train_defaults, **sizes})


def _memory_bytes(device_type: str) -> int:
    """Return the bytes a run may use: a share of a CPU's whole memory, or of another device's free memory."""
    if device_type == "cpu":
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE_OF_HOST)
    import torch

    torch.accelerator.empty_cache()  # what was measured is freed, and its memory still held
    return int(torch.accelerator.get_memory_info()[0] * _SHARE_OF_DEVICE)
