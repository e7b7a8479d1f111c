"""Speed of a step, alone on the device: `python -m scripts.gpu.speed [--small] [--only PART,...] [--list]`.

Eager cases first, then where a step's time goes, then compiled cases: a compilation can take minutes.
Rivals run in one process, which an 80 GB device holds: both full fine-tunings of 1 B in one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.parts import Part, main

_BUDGET_S = 200
_OURS = "full,lora,hf lora,hf trainer lora,preserve r=0.125,preserve r=0.25"


def parts_of(output: Path, small: bool) -> Sequence[Part]:
    """Return the parts; JSON files land in OUTPUT/PART/."""
    large_shape, small_shape = ("tiny", "tiny") if small else ("gpu", "gpu-135m")

    def benchmark(name: str, shape: str, methods: str, limit_s: float) -> Part:
        command = ["-m", "scripts.benchmark", "--shape", shape, "--rounds", "5"]
        return Part(name, limit_s, [*command, "--methods", methods, "--output", str(output / name)])

    def profile(name: str, shape: str, method: str) -> Part:
        command = ["-m", "scripts.benchmark.profiling", "--shape", shape, "--method", method]
        return Part(name, 30, [*command, "--output", str(output / f"{name}.json")])

    return [
        benchmark("eager-135m", small_shape, f"{_OURS},hf full", 60),
        benchmark("eager-1b", large_shape, _OURS, 75),
        benchmark("eager-1b-full", large_shape, "full,hf full", 45),
        profile("profile-1b-lora", large_shape, "lora"),
        profile("profile-1b-preserve", large_shape, "preserve r=0.125"),
        benchmark("compiled-1b-lora", large_shape, "lora,lora compiled", 90),
        benchmark(
            "compiled-1b-preserve", large_shape, "preserve r=0.125,preserve r=0.125 compiled", 120
        ),
        benchmark("compiled-1b-full", large_shape, "full,full compiled", 120),
    ]


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], parts_of, _BUDGET_S)
