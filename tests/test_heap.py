import subprocess
import sys
from pathlib import Path

import pytest

from scale_cli import heap

KEEPING_EVERY_OTHER = """
import resource, torch
from scale_cli.heap import hand_back_large_tensors
hand_back_large_tensors()
warm = torch.ones(1 << 23)
del warm
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, kept = peak(), []
for _ in range(40):
    freed = torch.ones(1 << 20)
    kept.append(freed + 1)
    del freed
print((peak() - before) / sum(tensor.nbytes for tensor in kept))
"""


def test_what_is_freed_between_kept_tensors_is_used_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KEEPING_EVERY_OTHER], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout) < 1.2, "1.8 in the heap of glibc 2.36"


ALLOCATING_AGAIN = """
import resource, sys, torch
from scale_cli import heap
heap._free_bytes = lambda: int(sys.argv[1])
heap.hand_back_large_tensors()
heap.keep_freed_memory(1 << 30)
step = lambda: [torch.ones(1 << 20) for _ in range(8)]
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("free_bytes", "is_kept"), [(2 << 30, True), ((2 << 30) - 1, False)])
def test_steps_take_the_pages_of_the_steps_before_where_there_is_room_for_two_peaks(
    free_bytes: int, is_kept: bool
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ALLOCATING_AGAIN, str(free_bytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(ended.stdout) < 1_000) == is_kept, f"{ended.stdout} new pages, of 32,768"


@pytest.mark.parametrize(
    ("group", "limit", "free_kib"),
    [
        ("", None, 900),
        ("jobs/1", "max", 900),
        ("jobs/1", "614400", 500),
        ("jobs/1", "9999999", 900),
    ],
)
def test_the_memory_that_is_left_is_the_machines_or_the_control_groups(
    tmp_path: Path, group: str, limit: str | None, free_kib: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:     900 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"4:memory:/other\n0::/{group}\n")
    if limit is not None:
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("102400\n")
    assert heap._free_bytes(tmp_path) == free_kib * 1024
