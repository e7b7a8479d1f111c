"""What a device is called, what its maker says that it computes, and what memory it took."""

from __future__ import annotations

import re
import resource
import sys

import torch

# Dense bf16 products, FLOP/s, by the makers' data sheets; an NVL of the same name is slower.
_PEAK_FLOPS_PER_S = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops_per_s(device_name: str, mixed_precision: str) -> float | None:
    """Return what a device's maker says it can do in the run's precision; None where no figure is known."""
    if mixed_precision != "bf16":
        return None
    peaks = _PEAK_FLOPS_PER_S.items()
    return next((peak for name, peak in peaks if re.search(rf"\b{name}\b(?! NVL)", device_name)), None)


def device_name(device: torch.device) -> str:
    """Return what a GPU is called; of anything else, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was taken so far: of a GPU by this process, else of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
