"""How fast a device is taken to be: as stated, or measured by a short product of matrices; what memory it took."""

from __future__ import annotations

import re
import resource
import sys
import time
from dataclasses import dataclass

import torch

# Of a device's measured products, what a whole training step sustains; 1B models on H100s are reported at 0.4 to 0.5.
DEFAULT_UTILISATION = 0.4
# Of a processor's bfloat16 products, which its matrix units compute faster than the rest of a step keeps up: models of
# 5 M parameters sustained 0.11.
CPU_BF16_UTILISATION = 0.1
_PROBE_S = 0.5
_PROBE_SIZE = {"cpu": 1024, "cuda": 8192}
# Dense bf16 products, FLOP/s, by the makers' data sheets; the first whose name is in a device's name holds.
_PEAK_FLOPS_PER_S = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "L4": 121e12,
}


@dataclass(frozen=True)
class Device:
    """What a time is computed with."""

    type: str  # `cpu` or `cuda`; `cuda` for a device that is stated
    flops_per_s: float  # of one process
    utilisation: float  # the share of it that training is taken to sustain
    origin: str  # where flops_per_s comes from, for the terminal

    @property
    def sustained_flops_per_s(self) -> float:
        """What training is taken to run at."""
        return self.flops_per_s * self.utilisation


def stated_device(flops_per_s: float, utilisation: float | None) -> Device:
    """Return a device by its sustained FLOP/s; a utilisation makes it a peak of which so much is sustained."""
    return Device("cuda", flops_per_s, 1.0 if utilisation is None else utilisation, "as stated")


def measured_device(mixed_precision: str, utilisation: float | None) -> Device:
    """Measure the device at hand in the run's precision."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device("cpu") if accelerator is None else accelerator
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
    size = _PROBE_SIZE.get(device.type, 4096)
    measured = product_flops_per_s(device, dtype, size)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    origin = f"measured on {name}: {str(dtype).removeprefix('torch.')} products of {size:,} x {size:,}"
    in_matrix_units = device.type == "cpu" and dtype == torch.bfloat16
    assumed = CPU_BF16_UTILISATION if in_matrix_units else DEFAULT_UTILISATION
    return Device(device.type, measured, assumed if utilisation is None else utilisation, origin)


def product_flops_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of square products, repeated for half a second after one that is not timed."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    (a @ b).sum().item()
    num_products, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < _PROBE_S:
        (a @ b)[0, 0].item()  # waits for the device
        num_products += 1
    return 2 * size**3 * num_products / elapsed_s


def peak_flops_per_s(device_name: str, mixed_precision: str) -> float | None:
    """Return what a device's maker says it can do in the run's precision; None where no figure is known."""
    if mixed_precision != "bf16":
        return None
    return next((peak for name, peak in _PEAK_FLOPS_PER_S.items() if re.search(rf"\b{name}\b", device_name)), None)


def device_name(device: torch.device) -> str:
    """Return what a GPU is called; of anything else, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was taken so far: of a GPU by this process, else of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
