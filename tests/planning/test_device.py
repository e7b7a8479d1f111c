from __future__ import annotations

import itertools
import time

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


def test_the_measured_rate_is_the_work_done_over_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that moves an eighth of a second whenever it is read: half a second is over after three products.
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=0.125).__next__)
    rate = product_flops_per_s(torch.device("cpu"), torch.float32, 16)
    assert rate == 3 * 2 * 16**3 / 0.5
