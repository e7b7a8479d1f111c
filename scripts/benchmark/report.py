"""The bars, the printed tables and the JSON file. Ratios are formed within rounds."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from scale_cli.report import Table
from scripts.benchmark.cases import COMPILED, PHASES
from scripts.benchmark.measuring import Measured
from scripts.benchmark.shapes import Shape

Results = dict[str, Measured]
# FLOP/s of dense 16-bit products, from the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}

_LARGE_VOCABULARY = 262_144  # tokens; logits that are held whole are then most of a step's memory


@dataclass(frozen=True)
class Bar:
    """A figure and its bar."""

    what: str  # the name of the figure
    figure: float  # median over rounds, if there are rounds
    quartiles: tuple[float, float] | None  # lower and upper; None for a count
    bar: float  # the required figure
    at_least: bool  # whether more is better

    @property
    def met(self) -> bool:
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar


def all_bars(shape: Shape, results: Results, head_peaks: tuple[int, int]) -> list[Bar]:
    top = f"route top:{shape.top_layers} r=0.125"
    bars = [
        _most(f"FLOPs / ideal, {name}", r.flops / r.ideal_flops, 1.02)
        for name, r in results.items()
        if r.ideal_flops
    ]
    for what, one, other, bar in (
        ("speed / full", "preserve r=0.125", "full", 2.2),
        ("speed / full", "preserve r=0.25", "full", 1.7),
        ("speed / HF+PEFT LoRA", "preserve r=0.125", "hf lora", 1.8),
        ("speed / HF+PEFT LoRA", "preserve r=0.25", "hf lora", 1.4),
        ("speed / HF+PEFT LoRA", "adapt r=0.125", "hf lora", 0.85),
        ("speed / HF+PEFT LoRA", "adapt r=0.25", "hf lora", 0.70),
        ("speed / HF+PEFT LoRA", top, "hf lora", 1.4),
        ("speed / HF Trainer", "full", "hf full", 1.0),
        ("speed / HF Trainer + PEFT LoRA", "lora", "hf trainer lora", 1.0),
        ("speed / TRL's SFTTrainer, packed", "lora", "trl lora", 1.0),
        *(("speed / uncompiled", f"{name} compiled", name, 1.0) for name in COMPILED),
    ):
        if one in results and other in results:
            bars.append(_speed(f"{what}, {one}", results[one], results[other], bar))
    for name, bar in (("preserve r=0.125", 0.30), ("preserve r=0.25", 0.40)):
        if name in results and "full" in results:
            share = results[name].saved_bytes / results["full"].saved_bytes
            bars.append(_most(f"saved activations / full, {name}", share, bar))
    if shape.sizes["vocab_size"] >= _LARGE_VOCABULARY and {"lora", "hf trainer lora"} <= {*results}:
        share = results["lora"].memory_bytes / results["hf trainer lora"].memory_bytes
        bars.append(_most("memory / HF Trainer + PEFT LoRA, lora", share, 0.60))
    ours, whole = head_peaks
    bars.append(_most("head's peak memory / whole logits", ours / whole, 0.10))
    waits = {
        name: r.shares()["data"]
        for name, r in results.items()
        if not name.startswith(("hf ", "trl "))
    }
    if waits:
        name = max(waits, key=waits.__getitem__)
        bars.append(_most(f"data wait / step, at most ({name})", waits[name], 0.01))
    return bars


def _most(what: str, figure: float, bar: float) -> Bar:
    return Bar(what, figure, None, bar, at_least=False)


def _speed(what: str, one: Measured, other: Measured, bar: float) -> Bar:
    ratios = np.array(one.tokens_per_s) / np.array(other.tokens_per_s)
    low, middle, high = (float(q) for q in np.percentile(ratios, [25, 50, 75]))
    return Bar(what, middle, (low, high), bar, at_least=True)


def table(shape: Shape, results: Results) -> str:
    titles = ["method", "tokens/s", "[quartiles]", "data", "fwd", "bwd", "opt"]
    titles += ["MFU", "GFLOP/token", "/ ideal", "saved MB", "peak MB"]
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
                "" if (mfu := _mfu(shape, result)) is None else f"{mfu:.3f}",
                f"{result.flops / shape.num_tokens / 1e9:.4f}",
                f"{result.flops / result.ideal_flops:.4f}" if result.ideal_flops else "",
                *(f"{size / 1e6:.1f}" for size in (result.saved_bytes, result.peak_bytes)),
            ]
        )
    heading = f"{shape.name}: {shape.num_tokens:,} tokens a step, {torch.get_num_threads()} thread(s), {_device(shape)}"
    return "\n".join([heading, *Table(titles, rows, "lrrrrrrrrrrr").lines()])


def bar_table(bars: list[Bar]) -> str:
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
    return {
        "shape": asdict(shape),
        "device": _device(shape),
        "num_threads": torch.get_num_threads(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "peft", "accelerate")
        },
        "methods": {
            name: {
                **asdict(result),
                "quartiles_tokens_per_s": result.quartiles(),
                "shares": result.shares(),
                "mfu": _mfu(shape, result),
            }
            for name, result in results.items()
        },
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
    }


def _device(shape: Shape) -> str:
    return torch.cuda.get_device_name() if shape.device == "cuda" else f"cpu {platform.machine()}"


def _mfu(shape: Shape, result: Measured) -> float | None:
    """Return the share of the device's stated FLOP/s that the method's own products use."""
    peak = peak_flops_per_s(_device(shape), shape.mixed_precision)
    if peak is None:
        return None
    flops_per_token = (result.ideal_flops or result.flops) / shape.num_tokens
    return result.quartiles()[1] * flops_per_token / peak


def peak_flops_per_s(named: str, mixed_precision: str) -> float | None:
    """Return the FLOP/s that a maker states for a precision; None if no figure is known."""
    if mixed_precision not in ("bf16", "fp16"):
        return None
    known = (
        peak for name, peak in _PEAK_FLOPS_PER_S.items() if re.search(rf"\b{name}\b(?! NVL)", named)
    )
    return next(known, None)
