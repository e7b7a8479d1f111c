"""What a device is taken to sustain is what the fastest steps of layers and a head reached."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.planning import device as speed
from scale_cli.planning.device import (
    Device,
    busyness,
    in_words,
    measure_device,
    peak_flops_per_s,
)
from scale_cli.planning.sizes import BaseSizes
from scale_cli.planning.stand_ins import HeadStandIn, LayersStandIn, within_bounds
from scale_cli.planning.walk import Base, walk
from tests.widening import TINY

TINY_SIZES = BaseSizes.of(LlamaConfig(**TINY).to_dict(), "tiny")
CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", ["full", "route"])
def test_what_is_timed_has_the_flops_of_the_methods_own_step(variant: str) -> None:
    method = MethodConfig(variant=variant)
    step = walk(Base(TINY_SIZES, itemsize=4), method)
    layers = LayersStandIn(TINY_SIZES, method, CPU, (3, 16))
    layers.run()
    assert len(layers.layers) == TINY_SIZES.num_hidden_layers
    assert layers.flops == pytest.approx(3 * 16 * (step.flops(16) - step.head_flops))
    head = HeadStandIn(TINY_SIZES, method, CPU, num_rows=40)
    head.run()
    assert head.flops == 40 * step.head_flops


def test_lora_is_timed_with_a_frozen_base_and_adapters() -> None:
    method = MethodConfig(variant="lora")
    layers = LayersStandIn(TINY_SIZES, method, CPU, (1, 8))
    assert [weight.requires_grad for weight in layers.layers[0]["q_proj"]] == [False, True, True]
    layers.run()
    planned = walk(Base(TINY_SIZES, itemsize=4), method)
    of_layers = 8 * (planned.flops(8) - planned.head_flops)
    assert of_layers <= layers.flops <= 1.3 * of_layers  # the lowest layer reads no gradient


@pytest.mark.parametrize(("load", "num_timed"), [(0.0, 3), (2.0, 1)])
def test_the_speeds_are_those_of_the_fastest_steps_once_warm_of_all_threads(
    monkeypatch: pytest.MonkeyPatch, load: float, num_timed: int
) -> None:
    """Beside other work threads would wait for each other: one of them is measured there."""
    # A measurement begins at 0 s, and its first step warms up.
    spent = [0.0, 0.15, 0.5, 0.3, 40.0, 0.7, 0.0, 0.15, 0.6, 9.0, 0.9, 40.0]
    now = accumulate(seconds * 3 for seconds in spent)
    used = []

    def process_time() -> float:
        used.append(torch.get_num_threads())
        return next(now)

    monkeypatch.setattr(speed, "time", SimpleNamespace(process_time=process_time))
    monkeypatch.setattr(speed, "busyness", lambda: load)
    method = MethodConfig()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        device = measure_device(TINY_SIZES, method, "no", 32)
        assert set(used) == {num_timed} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    step = walk(Base(TINY_SIZES, itemsize=4), method)
    of_layers = 512 * (step.flops(32) - step.head_flops)
    assert device.layers_flops_per_s == pytest.approx(of_layers / 0.3)
    num_rows = 2**21 // TINY_SIZES.vocab_size
    assert device.head_flops_per_s == pytest.approx(num_rows * step.head_flops / 0.6)
    assert "float32" in device.origin and "3 threads" in device.origin


def test_a_step_spends_its_products_at_the_speed_of_layers_or_head_and_muons_once() -> None:
    step = walk(Base(TINY_SIZES, itemsize=4), MethodConfig())
    device = Device("cpu", 2e9, 1e9, "stated")
    train = TrainConfig(max_steps=1, global_batch_size=6)
    batch_s = 6 * 32 * ((step.flops(32) - step.head_flops) / 2e9 + step.head_flops / 1e9)
    assert device.step_s(step, train, 32) == pytest.approx(batch_s)
    muon = train.model_copy(update={"optimiser": "muon"})
    assert device.step_s(step, muon, 32, 2) == pytest.approx(batch_s / 2 + step.muon_flops / 2e9)


def test_a_large_base_is_measured_by_small_layers_and_a_busy_machine_is_told() -> None:
    base = Qwen3Config(hidden_size=16384, intermediate_size=65536, vocab_size=10**7)
    small = within_bounds(BaseSizes.of(base.to_dict(), "large"))
    assert (small.hidden_size, small.intermediate_size) == (1024, 4096)
    device = measure_device(small, MethodConfig(variant="full"), "bf16")
    assert device.head_flops_per_s > 0 and "bfloat16" in device.origin
    assert "idle" in in_words(0.0) and "load 3.0" in in_words(3.0)
    assert busyness() >= 0.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),  # slower than an H100
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
    ],
)
def test_a_peak_is_known_by_the_devices_name_and_only_of_bfloat16(
    name: str, peak: float | None
) -> None:
    assert peak_flops_per_s(name, "bf16") == peak
    assert peak_flops_per_s(name, "no") is None
