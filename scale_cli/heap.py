"""What the C library does with main memory that is freed: glibc's; others are left as they are."""

from __future__ import annotations

import ctypes
from pathlib import Path

# mallopt's names: for the free memory at the heap's end that is handed back, and for the size from
# which an allocation has pages of its own.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
_HIGHEST_THRESHOLD = 1 << 25  # that glibc takes
_KEPT_BYTES = 1 << 30  # at the heap's end
_ROOM = 2  # peaks of a step that hands back; one that keeps has held up to 1.6 of them


def hand_back_large_tensors() -> None:
    """Have the C library give every large tensor pages of its own, and take them back when it is freed.

    In its heap, what a step frees lies between what it keeps for the backward pass, in gaps that
    aligned tensors of the same size do not fit: a step then holds up to 1.6 times as much.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)  # what is free already


def keep_freed_memory(peak_bytes: int = 0) -> None:
    """Have the C library keep what is freed from now on, if this machine has room for it.

    Linux clears every page that it gives out. Steps that hand everything back took 1.2 to 1.6 times as
    long, and evaluation twice as long (docs/results/training-speed.md).

    Args:
        peak_bytes: of steps that hand it back, in all processes together; 0 where nothing is kept for
            a backward pass.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt") and _free_bytes() >= _ROOM * peak_bytes:
        libc.mallopt(_M_MMAP_THRESHOLD, _HIGHEST_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.malloc_trim(0)


def _free_bytes(root: Path = Path("/")) -> int:
    """Return the main memory that is left on this machine, or in this process's control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    (free,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    groups = root / "proc/self/cgroup"
    named = groups.read_text().splitlines() if groups.is_file() else []
    group = root / "sys/fs/cgroup" / (named[-1].removeprefix("0::/") if named else "")
    limit = group / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return free
    return min(free, int(most) - int((group / "memory.current").read_text()))
