"""The speed of a device: measured on a small model like a run's, stated, or a maker's peak."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from scale_cli import processes
from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.model.family_scale import PER_LAYER_KEYS
from scale_cli.planning.step import FLOAT32, StepCost, step_cost
from scale_cli.terminal import log
from scale_cli.training.objective import for_training
from scale_cli.upscale.building import start_model
from scale_cli.values import counted

# Of the small model.
_MOST_CHANNELS = 1024
_LEAST_BYTES = 1 << 23  # of its layers' weights: more than a cache holds, as a model's are
_LONGEST_WINDOW = 512
_MOST_TOKENS = {"cpu": 2048, "cuda": 1 << 14}  # of a step
_MOST_FLOPS = {"cpu": 2.5e10, "cuda": 1e13}
_TIMED_S = 0.1


@dataclass(frozen=True)
class Device:
    """A device, with the speed that a plan's times use."""

    type: str  # `cpu` or `cuda`; `cuda` if the speed is stated
    flops_per_s: float  # that one process sustains in training
    origin: str  # where it comes from, for the terminal
    load: float = 0.0  # how many processes wanted a core meanwhile

    def step_s(
        self, step: StepCost, train: TrainConfig, sequence_length: int, num_processes: int = 1
    ) -> float:
        """Return the seconds of an optimiser step, whose batch the processes share."""
        num_tokens = train.global_batch_size * sequence_length / num_processes
        of_update = step.muon_flops if train.optimiser == "muon" else 0.0  # AdamW has no product
        return (num_tokens * step.flops(sequence_length) + of_update) / self.flops_per_s


def measure_device(
    base_config: Any, method: MethodConfig, mixed_precision: str, window: int = 256
) -> Device:
    """Measure at what speed a small model like the base trains by a method, by the clock on the wall.

    Beside other work, threads wait for each other, for a time that no short measurement tells. Then
    one thread is measured, and counts as often as cores are free.
    """
    device = processes.device()
    name = processes.device_name(device)
    dtype = processes.lowered_dtype(mixed_precision) or torch.float32
    origin = f"measured on {name} in {str(dtype).removeprefix('torch.')}"
    log(f"measuring      {name}: training steps of a small model by `{method.variant}`")
    load = os.getloadavg()[0]
    num_threads = torch.get_num_threads()
    times = 1.0  # as fast as what is measured
    if device.type == "cpu":
        num_cores = len(os.sched_getaffinity(0))
        origin += f", {counted(num_threads, 'thread')} on {counted(num_cores, 'core')}"
        if load + num_threads > num_cores + 0.5:
            torch.set_num_threads(1)
            times = min(max(num_cores - load, 1.0), num_threads)
            origin += (
                f". Other work (load {load:.1f}) slows this machine down: the run is faster without it; "
                "plan again when it has ended"
            )

    small = small_config(base_config)
    alike = method_on_all_layers(method)
    length = min(window, _LONGEST_WINDOW)
    flops = step_cost(small, alike, mixed_precision).flops(length)  # of a token
    num_tokens = min(_MOST_TOKENS[device.type], int(_MOST_FLOPS[device.type] / flops))
    ids = torch.zeros(max(1, num_tokens // length), length, dtype=torch.long, device=device)
    base: Any = AutoModelForCausalLM.from_config(small, dtype=dtype).requires_grad_(False).eval()
    model: Any = start_model(base, alike, seed=0)
    model.to(device)
    step_s = _step_s(model.train(), ids, mixed_precision)
    torch.set_num_threads(num_threads)
    return Device(device.type, times * ids.numel() * flops / step_s, origin, round(load, 1))


def _step_s(model: Any, ids: torch.Tensor, mixed_precision: str) -> float:
    """Return the mean time of a forward and backward pass, without the first one, which warms up."""
    step = for_training(model, TrainConfig(max_steps=1))
    asked = {"labels": ids, "shift_labels": ids, "num_items_in_batch": ids.numel()}
    taken_s: list[float] = []
    while sum(taken_s[1:]) < _TIMED_S:
        begun_s = time.perf_counter()
        model.zero_grad()
        with processes.autocast(ids.device.type, mixed_precision):
            loss = step(input_ids=ids, use_cache=False, **asked).loss
        loss.backward()
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s.append(time.perf_counter() - begun_s)
    return sum(taken_s[1:]) / len(taken_s[1:])


def small_config(base_config: Any) -> Any:
    """Return the configuration of a model that is small enough to be measured.

    It has a base's widths, up to a bound, and the same share of its layers and of its vocabulary: so it spends the
    part of its time in the head that the base does.
    """
    small = deepcopy(base_config)
    share = min(1.0, _MOST_CHANNELS / small.hidden_size)
    group = small.num_attention_heads // small.num_key_value_heads
    num_key_value_heads = max(1, round(share * small.num_key_value_heads))
    num_heads = group * num_key_value_heads
    head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    width = max(1, round(share * small.hidden_size / num_heads)) * num_heads
    mlp_width = max(1, round(share * small.intermediate_size))

    of_heads = 2 * head_dim * (num_heads + num_key_value_heads)
    layer_bytes = FLOAT32 * width * (of_heads + 3 * mlp_width)
    num_layers = min(small.num_hidden_layers, -(-_LEAST_BYTES // layer_bytes))
    vocab_size = share * small.vocab_size * num_layers / small.num_hidden_layers
    small.update(
        {
            "hidden_size": width,
            "intermediate_size": mlp_width,
            "num_key_value_heads": num_key_value_heads,
            "num_attention_heads": num_heads,
            "head_dim": head_dim,
            "num_hidden_layers": num_layers,
            "vocab_size": max(1, round(vocab_size)),
            "pad_token_id": None,
        }
    )
    for key in PER_LAYER_KEYS:
        if of_layers := getattr(small, key, None):
            setattr(small, key, of_layers[:num_layers])
    return small


def method_on_all_layers(method: MethodConfig) -> MethodConfig:
    """Return a method as it is measured, without settings of single layers."""
    definition = method.definition
    variant = method.variant if definition.streams.shares_weights else "full"
    sections = method.model_dump()
    rank = {"rank": sections["lora"]["rank"]}
    return MethodConfig.model_validate(
        {"variant": variant, "expansion": sections["expansion"], "lora": rank}
    )
