"""What a device is taken to sustain is what steps of a layer reached, and the median of them."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen3Config

from scale_cli.planning import device as speed
from scale_cli.planning.device import busyness, in_words, measure_device, peak_flops_per_s
from scale_cli.planning.sizes import BaseSizes
from tests.widening import TINY


def test_the_rate_is_the_work_of_layers_and_head_at_the_medians_of_their_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = iter([9.0, 0.2, 0.3, 0.3, 0.5, 40.0, 0.001, 9.0, 0.2, 0.6, 0.1, 0.6, 40.0, 0.6])
    now = [0.0]

    def clock() -> float:
        now.append(now[-1] + (next(taken) if len(now) % 2 == 0 else 0.0))
        return now[-1]

    monkeypatch.setattr(speed, "time", SimpleNamespace(process_time=clock))
    sizes = BaseSizes.of(LlamaConfig(**TINY).to_dict(), "tiny")
    device = measure_device(sizes, "no")
    width = sizes.hidden_size
    channels = min(sizes.intermediate_size, 4 * width)
    of_layer = 6 * (4 * width * width + 3 * width * channels) + 12 * width * 129 / 2
    of_head = 6 * width * sizes.vocab_size
    heads = 2 * sizes.head_dim * (sizes.num_attention_heads + sizes.num_key_value_heads)
    in_layers = 6 * sizes.num_hidden_layers * width * (heads + 3 * sizes.intermediate_size)
    time_s = in_layers * 0.3 / (128 * of_layer) + of_head * 0.6 / (128 * of_head)
    assert device.flops_per_s / device.num_threads == pytest.approx((in_layers + of_head) / time_s)
    assert "float32" in device.origin and f"{device.num_threads} thread" in device.origin


def test_a_large_base_is_measured_by_a_small_layer_and_a_busy_machine_is_told() -> None:
    base = Qwen3Config(hidden_size=16384, intermediate_size=65536, vocab_size=10**7)
    device = measure_device(BaseSizes.of(base.to_dict(), "large"), "bf16")
    assert device.flops_per_s > 0 and "bfloat16" in device.origin
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
