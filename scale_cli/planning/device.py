"""The speed of a device: measured on a layer and a head like a run's, stated, or a maker's peak."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.training import TrainConfig
from scale_cli.planning.memory import rows_at_once, step_of
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.step import Step
from scale_cli.terminal import log
from scale_cli.values import counted

if TYPE_CHECKING:
    from scale_cli.planning.stand_ins import StandIn

# Of what is timed.
_LONGEST_WINDOW = 512
_MOST_TOKENS = {"cpu": 512, "cuda": 1 << 14}
# A processor that has begun to compute gets faster, or slower, for a while.
_WARM_UP_S = 0.1
_TIMED_S = 0.2  # of each of the two
_FEWEST_TIMINGS = 4
_IDLE_LOAD = 0.3  # processes that wait for a core, on a machine that is called idle
# FLOP/s of dense 16-bit products, from the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


@dataclass(frozen=True)
class Device:
    """A device, with the speeds that a plan's times use."""

    type: str  # `cpu` or `cuda`; `cuda` if the speed is stated
    layers_flops_per_s: float  # that one process sustains in training, in the layers
    head_flops_per_s: float  # and in the head, with the loss
    origin: str  # where they come from, for the terminal
    load: float = 0.0  # how many processes wanted a core meanwhile
    num_threads: int = 0  # that compute at these speeds; 0 if they are stated

    def token_s(self, step: Step, sequence_length: int) -> float:
        """Return the seconds of training on a token, without the update."""
        in_layers = step.flops(sequence_length) - step.head_flops
        return in_layers / self.layers_flops_per_s + step.head_flops / self.head_flops_per_s

    def step_s(
        self, step: Step, train: TrainConfig, sequence_length: int, num_processes: int = 1
    ) -> float:
        """Return the seconds of an optimiser step, whose batch the processes share."""
        num_tokens = train.global_batch_size * sequence_length / num_processes
        update_s = update_flops(step, train) / self.layers_flops_per_s
        return num_tokens * self.token_s(step, sequence_length) + update_s


def update_flops(step: Step, train: TrainConfig) -> float:
    """Return the FLOPs of an update's products; AdamW has none."""
    return step.muon_flops if train.optimiser == "muon" else 0.0


def busyness() -> float:
    """Return how many processes have wanted a core in the last minute."""
    return os.getloadavg()[0]


def measure_device(
    sizes: BaseSizes, method: MethodConfig, mixed_precision: str, window: int = 256
) -> Device:
    """Measure the speed of training steps of a method's layer and head, of at most 1,024 channels.

    A whole step is taken to spend its FLOPs at these two speeds. Each is the fastest step's of 0.2 s.
    """
    import torch

    from scale_cli.planning.stand_ins import HeadStandIn, LayersStandIn, within_bounds

    load = busyness()
    is_cpu = not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "1"
    accelerator = None if is_cpu else torch.accelerator.current_accelerator()
    where = torch.device("cpu") if accelerator is None else accelerator
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    precision = str(dtype or torch.float32).removeprefix("torch.")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    # Other work does not change the time that a processor spends; what waits for a device counts.
    # Threads that wait for each other spend time too, where other work keeps one of them waiting.
    before = torch.get_num_threads()
    num_threads = before if is_cpu else 1
    num_timed = num_threads if load < _IDLE_LOAD else 1
    clock = time.process_time if is_cpu else time.perf_counter
    measured = f"a layer and the head of `{method.variant}` in {precision}"
    log(f"measuring      {name}: training steps of {measured}")

    def speed_of(stand_in: StandIn) -> float:
        """Return the FLOP/s of a stand-in's fastest step: other work has slowed the others down."""
        speeds: list[float] = []
        begun_s = clock()
        taken_s = 0.0
        while len(speeds) < _FEWEST_TIMINGS or taken_s < _WARM_UP_S + _TIMED_S:
            started_s = taken_s
            stand_in.flops = 0.0
            stand_in.run()
            if not is_cpu:
                torch.accelerator.synchronize()
            taken_s = (clock() - begun_s) / num_timed
            if started_s >= _WARM_UP_S:
                speeds.append(stand_in.flops / (taken_s - started_s))
        return max(speeds) * num_threads / num_timed

    small = within_bounds(sizes)
    length = min(window, _LONGEST_WINDOW)
    batch = (_MOST_TOKENS["cpu" if is_cpu else "cuda"] // length, length)
    num_rows = rows_at_once(where.type, sizes.vocab_size)
    torch.set_num_threads(num_timed)
    try:
        with torch.autocast(where.type, dtype, enabled=dtype is not None):
            layers_flops_per_s = speed_of(LayersStandIn(small, method, where, batch))
            head_flops_per_s = speed_of(HeadStandIn(small, method, where, num_rows))
    finally:
        torch.set_num_threads(before)

    origin = f"measured on {name}: training steps of {measured}"
    if is_cpu:
        origin += f", {num_threads} thread{'s' if num_threads > 1 else ''} {in_words(load)}"
    return Device(
        where.type, layers_flops_per_s, head_flops_per_s, origin, round(load, 1), num_threads
    )


def in_words(load: float) -> str:
    num_cores = counted(len(os.sched_getaffinity(0)), "core")
    if load < _IDLE_LOAD:
        return f"of an idle machine ({num_cores})"
    return f"alone; other work (load {load:.1f} on {num_cores}) makes it slower"


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
