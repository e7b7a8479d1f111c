"""Where the time of one training step goes: kernels, their launches, and how long the device is busy.

python -m scripts.benchmark.profiling --shape gpu-135m --method "preserve r=0.25" --output FILE.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from scale_cli.storage.atomic import write_json
from scripts.benchmark.cases import SEED, cases
from scripts.benchmark.shapes import SHAPES, Shape

_WARM_UP_STEPS = 3
_PROFILED_STEPS = 3
_NUM_ROWS = 25  # of operations, by the time they take themselves


def profile_steps(shape: Shape, method: str) -> dict[str, Any]:
    """Return what a step costs: its wall time, the device's busy time, launches, and the dearest operations.

    `busy` is the device's own time as a share of the wall time of steps that nothing watches. Much below 1, the
    device waits for the processor that launches its kernels. On a processor the operations' own time stands for it.
    """
    on_gpu = shape.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as scratch:
        batches = shape.batches(Path(scratch), SEED)
        case = cases(shape, batches, Path(scratch))[method]()
        for index in range(_WARM_UP_STEPS):
            case.step(index)
        started_s = time.perf_counter()  # a step returns its loss, so it waits for the device
        for index in range(_PROFILED_STEPS):
            case.step(_WARM_UP_STEPS + index)
        step_s = (time.perf_counter() - started_s) / _PROFILED_STEPS
        phases_s = case.clock.phases_s()

        with profile(activities=activities) as profiler:
            for index in range(_PROFILED_STEPS):
                case.step(_WARM_UP_STEPS + _PROFILED_STEPS + index)

    def own_us(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=own_us, reverse=True)
    busy_s = sum(own_us(event) for event in events) / 1e6 / _PROFILED_STEPS
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    return {
        "shape": shape.name,
        "method": method,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "step_s": step_s,
        "phases_s": phases_s,
        "busy": busy_s / step_s,
        "launches_per_step": launches // _PROFILED_STEPS,
        "operations": [
            {
                "name": event.key,
                "ms_per_step": own_us(event) / 1000 / _PROFILED_STEPS,
                "calls_per_step": event.count // _PROFILED_STEPS,
            }
            for event in events[:_NUM_ROWS]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--method", default="preserve r=0.25")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()

    measured = profile_steps(SHAPES[given.shape], given.method)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.output, measured)
    print(
        f"{measured['method']}: {measured['step_s']:.4f} s a step, busy {measured['busy']:.0%}, ",
        end="",
    )
    print(f"{measured['launches_per_step']} launches; written {given.output}")
    for row in measured["operations"][:10]:
        print(f"{row['ms_per_step']:10.3f} ms {row['calls_per_step']:6} x {row['name'][:80]}")


if __name__ == "__main__":
    main()
