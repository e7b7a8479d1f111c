"""The tables that are printed, and the JSON that is written."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from scale_cli.report import Table
from scripts.benchmark.bars import Bar, Results
from scripts.benchmark.clock import PHASES
from scripts.benchmark.shapes import Shape


def table(shape: Shape, results: Results) -> str:
    """Return one line for every case."""
    titles = ["method", "tokens/s", "[quartiles]", "data", "fwd", "bwd", "opt"]
    titles += ["GFLOP/token", "/ ideal", "saved MB", "peak MB"]
    rows = []
    for name, result in results.items():
        low, middle, high = result.quartiles()
        shares = result.shares()
        rows.append(
            [
                name,
                f"{middle:,.0f}",
                f"[{low:,.0f}, {high:,.0f}]",
                f"{shares['data']:.2%}",
                *(f"{shares[phase]:.1%}" for phase in PHASES[1:]),
                f"{result.flops / shape.num_tokens / 1e9:.4f}",
                f"{result.flops / result.ideal_flops:.4f}" if result.ideal_flops else "",
                *(f"{size / 1e6:.1f}" for size in (result.saved_bytes, result.peak_bytes)),
            ]
        )
    heading = f"{shape.name}: {shape.num_tokens:,} tokens a step, {torch.get_num_threads()} thread(s), {_device(shape)}"
    return "\n".join([heading, *Table(titles, rows, "lrrrrrrrrrr").lines()])


def bar_table(bars: list[Bar]) -> str:
    """Return one line for every bar."""
    rows = [
        [
            bar.what,
            f"{bar.figure:.4f}",
            "" if bar.quartiles is None else "[{:.3f}, {:.3f}]".format(*bar.quartiles),
            f"{'>=' if bar.at_least else '<='} {bar.bar:g}",
            "met" if bar.met else "MISSED",
        ]
        for bar in bars
    ]
    return "\n".join(Table(["bar", "figure", "[quartiles]", "asked", ""], rows, "lrrrl").lines())


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
