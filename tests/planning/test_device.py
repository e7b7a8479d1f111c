"""What a device is taken to sustain is what training steps of a small model reached on it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.planning import device as speed
from scale_cli.planning.device import (
    Device,
    measure_device,
    small_config,
)
from scale_cli.planning.step import step_cost
from tests.widening import TINY

TINY_BASE = LlamaConfig(**TINY)


@pytest.mark.parametrize(
    ("num_cores", "load", "num_timed", "times"),
    [(4, 0.0, 3, 1.0), (4, 9.0, 1, 1.0), (4, 2.0, 1, 2.0)],
    ids=["idle", "full", "half full"],
)
def test_the_speed_is_that_of_all_steps_by_the_clock_on_the_wall_but_the_first(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, load: float, num_timed: int, times: float
) -> None:
    """What other work takes of the machine, the run does not get; the words say what to do.

    Beside other work threads would wait for each other: one of them is measured there.
    """
    # A step begins, and ends: 9 s for the first one, 0.1 s and 0.3 s for the others.
    now = iter([0.0, 9.0, 9.0, 9.1, 10.0, 10.3])
    used = []

    def perf_counter() -> float:
        used.append(torch.get_num_threads())
        return next(now)

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(num_cores))
    method = MethodConfig()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        device = measure_device(TINY_BASE, method, "no", 32)
        assert set(used) == {num_timed} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    flops = 2048 * step_cost(small_config(TINY_BASE), method).flops(32)
    assert device.flops_per_s == pytest.approx(times * flops / 0.2)
    assert "float32, 3 threads on 4 cores" in device.origin
    assert ("Other work (load" in device.origin) == ("plan again" in device.origin) == (load > 0)


def test_a_step_spends_its_products_and_muons_at_the_speed_of_the_device() -> None:
    step = step_cost(TINY_BASE, MethodConfig())
    device = Device("cpu", 2e9, "stated")
    train = TrainConfig(max_steps=1, global_batch_size=6)
    batch_s = 6 * 32 * step.flops(32) / 2e9
    assert device.step_s(step, train, 32) == pytest.approx(batch_s)
    muon = train.model_copy(update={"optimiser": "muon"})
    assert device.step_s(step, muon, 32, 2) == pytest.approx(batch_s / 2 + step.muon_flops / 2e9)


def test_a_large_base_is_measured_by_a_small_model_with_the_same_part_in_its_head() -> None:
    base = Qwen3Config(hidden_size=16384, intermediate_size=65536, vocab_size=10**6)
    small = small_config(base)
    assert (small.hidden_size, small.intermediate_size) == (1024, 4096)
    layers_by_head = [
        of.num_hidden_layers * of.intermediate_size / of.vocab_size for of in (base, small)
    ]
    assert layers_by_head[1] == pytest.approx(layers_by_head[0], rel=0.15)
    device = measure_device(base, MethodConfig(variant="full"), "no")
    assert device.flops_per_s > 0 and "float32" in device.origin
