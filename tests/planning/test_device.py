from __future__ import annotations

import pytest

from scale_cli.planning.device import peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),  # slower than an H100
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
    ],
)
def test_a_peak_is_known_by_the_devices_name_and_only_of_bfloat16(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name, "bf16") == peak
    assert peak_flops_per_s(name, "no") is None
