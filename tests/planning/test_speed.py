"""What a device is taken to sustain is what passes of real layers reached, and the median of them."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from scale_cli import planning as speed
from scale_cli.config.schema import MethodConfig
from scale_cli.planning import count_flops, measure_device, peak_flops_per_s
from scale_cli.upscale.base import base_without_weights
from scale_cli.upscale.building import build_model
from tests.widening import TINY


def test_the_rate_is_the_work_of_a_pass_over_the_median_of_its_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = iter([9.0, 0.2, *[0.3] * 4, *[0.5] * 3, 40.0, 0.001])
    now = [0.0]

    def clock() -> float:
        now.append(now[-1] + (next(taken) if len(now) % 2 == 0 else 0.0))
        return now[-1]

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=clock))
    base = LlamaConfig(**{**TINY, "num_hidden_layers": 1})
    device = measure_device(base, "float32", "no")
    with torch.device("meta"):
        model = build_model(base_without_weights(base, "float32"), MethodConfig(), seed=0)
    assert device.flops_per_s == pytest.approx(128 * count_flops(model, 128).total(128) / 0.3)
    assert "float32" in device.origin


def test_a_large_base_is_measured_by_few_of_its_layers() -> None:
    base = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=10_000,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=10**7,
        pad_token_id=10**7 - 1,
    )
    before = base.to_dict()
    device = measure_device(base, "bfloat16", "bf16")
    assert device.flops_per_s > 0 and "bfloat16" in device.origin
    assert base.to_dict() == before


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
def test_a_peak_is_known_by_the_devices_name_and_only_of_bfloat16(
    name: str, peak: float | None
) -> None:
    assert peak_flops_per_s(name, "bf16") == peak
    assert peak_flops_per_s(name, "no") is None
