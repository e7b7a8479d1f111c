"""Estimate runs on many GPUs: step time, bytes sent by each sharding, checkpoints; computed, not measured.

    python -m scripts.large_runs [--gib-per-s 46] [--flops 4e14]

Parameters and FLOPs are those of `scale plan` for shapes like Llama-3.2-1B and Llama-3.1-8B, with route at r = 1/8.
tests/training/test_sharding.py counts what a step exchanges. Without sharding: every gradient once, in float32, in both
directions. With sharding: trained weights twice per micro-batch, in bfloat16, and their gradients once per step. With
`all`: the base too, once per micro-batch.
"""

from __future__ import annotations

import argparse

from scale_cli.config.schema import MethodConfig
from scale_cli.planning.step import step_cost
from scripts.random_base import reference_config

LENGTH, WINDOWS = 8192, 512  # of a step of the reference config
SHAPES = {"1 B": (16, 2048), "8 B": (32, 4096)}
GPUS = (8, 64, 512)
AT_ONCE = 8  # windows per micro-batch
METHOD = MethodConfig.model_validate({"variant": "route", "expansion": {"ratio": 0.125}})
_GB = 1e9


def exchanged_bytes(trained: int, frozen: int, num_micro_batches: int) -> dict[str, float]:
    """Return the bytes a process sends per step, by `train.sharding`; of many processes, each sends all but its own."""
    gathered = 2 * 2 * trained * num_micro_batches
    return {
        "none": 2 * 4 * trained,
        "expansion": gathered + 4 * trained,
        "all": gathered + 4 * trained + 2 * frozen * num_micro_batches,
    }


def main() -> None:
    """Print a row for each shape and number of GPUs."""
    parser = argparse.ArgumentParser(
        "python -m scripts.large_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--gib-per-s", type=float, default=46.0, help="between machines, a GPU's own (400 Gbit/s)"
    )
    parser.add_argument(
        "--flops", type=float, default=4e14, help="that a GPU sustains (an H100: 0.4 of its peak)"
    )
    given = parser.parse_args()
    print(
        "| base | GPUs | step s | none GB, s | expansion GB, s | all GB, s | 60 B tokens | 1 T tokens | checkpoint GB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, (layers, hidden) in SHAPES.items():
        base = reference_config(layers, hidden, 128_256)
        step = step_cost(base, METHOD)
        trained, frozen = step.num_trainable, step.num_frozen
        flops_per_token = step.flops(LENGTH)
        for gpus in GPUS:
            per_gpu = WINDOWS // gpus
            step_s = per_gpu * LENGTH * flops_per_token / given.flops
            cells = [
                f"{sent / _GB:.1f}, {sent / (given.gib_per_s * 2**30):.2f}"
                for sent in exchanged_bytes(trained, frozen, max(1, per_gpu // AT_ONCE)).values()
            ]
            days = [tokens / (WINDOWS * LENGTH) * step_s / 86_400 for tokens in (60e9, 1e12)]
            print(
                f"| {name} | {gpus} | {step_s:.2f} | {' | '.join(cells)} | {days[0]:.2f} d | {days[1]:.1f} d "
                f"| {12 * trained / _GB:.1f} |"
            )


if __name__ == "__main__":
    main()
