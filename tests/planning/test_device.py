from __future__ import annotations

import pytest
import torch

from scale_cli.planning.device import DEFAULT_UTILISATION, measured_device, product_flops_per_s, stated_device


def test_a_stated_device_sustains_what_is_stated() -> None:
    assert stated_device(4e14, None).sustained_flops_per_s == 4e14
    assert stated_device(1e15, 0.5).sustained_flops_per_s == 5e14


def test_a_measured_device_is_taken_to_sustain_a_share_of_what_was_measured() -> None:
    device = measured_device("no", None)
    assert device.sustained_flops_per_s == device.flops_per_s * DEFAULT_UTILISATION
    assert "float32" in device.origin
    assert measured_device("bf16", 0.9).utilisation == 0.9


def test_the_measured_rate_does_not_hang_on_the_size_of_the_products() -> None:
    small, large = (product_flops_per_s(torch.device("cpu"), torch.float32, size) for size in (384, 768))
    # Twice the side is eight times the work: a count that were off by a power of the size would show as 2 or more.
    assert large / small == pytest.approx(1.0, abs=0.8)
