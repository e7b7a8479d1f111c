from __future__ import annotations

import itertools
import time

import pytest
import torch

from scale_cli.planning.device import (
    CPU_BF16_UTILISATION,
    DEFAULT_UTILISATION,
    measured_device,
    peak_flops_per_s,
    product_flops_per_s,
    stated_device,
)


def test_a_stated_device_sustains_what_is_stated() -> None:
    assert stated_device(4e14, None).sustained_flops_per_s == 4e14
    assert stated_device(1e15, 0.5).sustained_flops_per_s == 5e14


def test_a_measured_device_is_taken_to_sustain_a_share_of_what_was_measured() -> None:
    device = measured_device("no", None)
    assert device.sustained_flops_per_s == device.flops_per_s * DEFAULT_UTILISATION
    assert "float32" in device.origin
    assert measured_device("bf16", 0.9).utilisation == 0.9


def test_of_a_processors_bfloat16_products_a_smaller_share_is_taken_to_be_sustained() -> None:
    assert measured_device("bf16", None).utilisation == CPU_BF16_UTILISATION < DEFAULT_UTILISATION


def test_the_measured_rate_is_the_work_done_over_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that moves an eighth of a second whenever it is read: half a second is over after three products.
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=0.125).__next__)
    rate = product_flops_per_s(torch.device("cpu"), torch.float32, 16)
    assert rate == 3 * 2 * 16**3 / 0.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),  # not an L4
        ("cpu", None),
    ],
)
def test_a_peak_is_known_by_the_devices_name_and_only_of_bfloat16(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name, "bf16") == peak
    assert peak_flops_per_s(name, "no") is None
