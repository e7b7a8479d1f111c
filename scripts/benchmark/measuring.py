"""Rounds of measurements: every case has one turn per round, so that noise of the machine affects all alike.

A step is timed by the wall clock on a GPU, and by this process's CPU time on a CPU, which other users of a shared
machine do not affect. Waiting shows only in the wall clock: `Measured.phases_s`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from scale_cli.config.schema import MethodConfig
from scale_cli.data.batches import Batches
from scripts.benchmark.algebra import ideal_flops_per_token
from scripts.benchmark.cases import PHASES, BenchmarkCase
from scripts.benchmark.counting import count_flops, peak_bytes, saved_activation_bytes
from scripts.benchmark.shapes import Shape


@dataclass
class Measured:
    """The measurements of one case."""

    name: str  # of the case
    trainable_parameters: int  # that an optimiser updates
    weight_bytes: int  # of the model
    flops: int  # counted in one step
    ideal_flops: int | None  # the mathematical minimum; None if the case is not ours
    saved_bytes: int  # activations the decoder keeps for backward
    peak_bytes: int  # the most bytes held at once in a step, beyond weights and optimiser state
    # of each round; on a CPU, per second of this process's CPU time
    tokens_per_s: list[float] = field(default_factory=list)
    # seconds of each phase in each round, by the wall clock
    phases_s: list[dict[str, float]] = field(default_factory=list)
    loss: float = float("nan")  # of the last step

    @property
    def memory_bytes(self) -> int:
        """The most bytes held at once: weights, AdamW's moments in float32, and a step's peak."""
        return self.weight_bytes + 8 * self.trainable_parameters + self.peak_bytes

    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = np.percentile(self.tokens_per_s, [25, 50, 75])
        return float(low), float(middle), float(high)

    def shares(self) -> dict[str, float]:
        totals = {phase: sum(round_s[phase] for round_s in self.phases_s) for phase in PHASES}
        return {phase: seconds / sum(totals.values()) for phase, seconds in totals.items()}


def measure_counts(case: BenchmarkCase, shape: Shape, batches: Batches) -> Measured:
    """Take a case's first steps, which also warm it up, and count what needs no clock.

    The counters see single operations, so a compiled decoder is counted uncompiled, and timed compiled.
    """
    case.step(0)
    (batch,) = batches.of_step(3).micro_batches
    model: Any = case.model
    with torch.compiler.set_stance("force_eager"):
        flops = count_flops(lambda: case.step(1))
        peak = peak_bytes(lambda: case.step(2))
        saved = saved_activation_bytes(
            model, batch.input_ids.to(shape.device), shape.mixed_precision
        )
    return Measured(
        name=case.name,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        flops=flops,
        ideal_flops=None if case.method is None else ideal_flops(shape, case.method),
        saved_bytes=saved,
        peak_bytes=peak,
    )


def ideal_flops(shape: Shape, method: MethodConfig) -> int:
    """Return the FLOPs that one step needs, by algebra, with attention as torch's counter counts the fused kernel."""
    per_token = ideal_flops_per_token(shape.llama_config(), method, shape.sequence_length)
    return round(per_token.total_fused * shape.num_tokens)


def take_rounds(
    cases: list[BenchmarkCase],
    results: list[Measured],
    shape: Shape,
    num_rounds: int,
    log: Callable[[str], None],
) -> None:
    """Time one step of every case in every round; the order rotates by one place per round."""
    pairs = list(zip(cases, results, strict=True))
    for index in range(num_rounds):
        gc.collect()
        gc.disable()
        for case, result in pairs[index % len(pairs) :] + pairs[: index % len(pairs)]:
            elapsed_s = _timed(case, result, 4 + index, shape)
            result.tokens_per_s.append(shape.num_tokens / elapsed_s)
        gc.enable()
        log(f"round {index + 1} of {num_rounds}")


def _timed(case: BenchmarkCase, result: Measured, index: int, shape: Shape) -> float:
    on_gpu = shape.device == "cuda"
    now_s = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    started_s = now_s()
    result.loss = case.step(index)
    if on_gpu:
        torch.cuda.synchronize()
    elapsed_s = now_s() - started_s
    result.phases_s.append(case.clock.phases_s())
    return elapsed_s
