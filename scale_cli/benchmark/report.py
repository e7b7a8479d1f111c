"""The tables that are printed, and the JSON that is written."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from scale_cli.benchmark.bars import Bar, Results
from scale_cli.benchmark.clock import PHASES
from scale_cli.benchmark.shapes import Shape


def table(shape: Shape, results: Results) -> str:
    """Return one line for every contestant."""
    head = f"{'method':27}{'tokens/s':>10} {'[quartiles]':>17}{'data':>8}{'fwd':>7}{'bwd':>7}{'opt':>7}"
    head += f"{'GFLOP/token':>13}{'/ ideal':>9}{'saved MB':>10}{'peak MB':>9}"
    lines = [
        f"{shape.name}: {shape.num_tokens:,} tokens a step, {torch.get_num_threads()} thread(s), {_device(shape)}",
        head,
    ]
    for name, result in results.items():
        low, middle, high = result.quartiles()
        shares = result.shares()
        split = f"{shares['data']:>8.2%}" + "".join(f"{shares[phase]:>7.1%}" for phase in PHASES[1:])
        ideal = f"{result.flops / result.ideal_flops:>9.4f}" if result.ideal_flops else f"{'':>9}"
        lines.append(
            f"{name:27}{middle:>10,.0f} {f'[{low:,.0f}, {high:,.0f}]':>17}{split}"
            f"{result.flops / shape.num_tokens / 1e9:>13.4f}{ideal}"
            f"{result.saved_bytes / 1e6:>10.1f}{result.peak_bytes / 1e6:>9.1f}"
        )
    return "\n".join(lines)


def bar_table(bars: list[Bar]) -> str:
    """Return one line for every bar."""
    lines = [f"{'bar':52}{'figure':>8} {'[quartiles]':>16}{'asked':>9}"]
    for bar in bars:
        spread = "" if bar.quartiles is None else "[{:.3f}, {:.3f}]".format(*bar.quartiles)
        asked = f"{'>=' if bar.at_least else '<='} {bar.bar:g}"
        lines.append(f"{bar.what:52}{bar.figure:>8.4f} {spread:>16}{asked:>9}  {'met' if bar.met else 'MISSED'}")
    return "\n".join(lines)


def to_json(shape: Shape, results: Results, bars: list[Bar]) -> dict[str, Any]:
    """Return everything that was measured, rounds included."""
    return {
        "shape": asdict(shape),
        "device": _device(shape),
        "num_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
        "methods": {
            name: {**asdict(result), "quartiles_tokens_per_s": result.quartiles(), "shares": result.shares()}
            for name, result in results.items()
        },
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
    }


def _device(shape: Shape) -> str:
    return torch.cuda.get_device_name() if shape.device == "cuda" else f"cpu {platform.machine()}"
