from pathlib import Path

import pytest

from scale_cli.config.schema import MethodConfig
from scale_cli.planning.step import step_cost
from scale_cli.storage.atomic import read_json
from scripts.benchmark.__main__ import run_benchmark
from scripts.benchmark.algebra import ideal_flops_per_token
from scripts.benchmark.cases import cases, ours
from scripts.benchmark.counting import count_flops
from scripts.benchmark.measuring import ideal_flops
from scripts.benchmark.report import peak_flops_per_s
from scripts.benchmark.shapes import SHAPES

TINY = SHAPES["tiny"]


def test_a_run_times_every_method_in_every_round_and_writes_what_it_prints(tmp_path: Path) -> None:
    lines: list[str] = []
    names = ["full", "hf full", "hf lora", "preserve r=0.25"]
    results = run_benchmark(TINY, names, 2, tmp_path, lines.append)
    assert list(results) == names
    written = read_json(tmp_path / "tiny.json")
    for name, result in results.items():
        assert len(result.tokens_per_s) == 2 and min(result.tokens_per_s) > 0
        assert sum(result.shares().values()) == pytest.approx(1.0)
        assert written["methods"][name]["flops"] == result.flops
        assert f"\n{name}" in lines[-1]
    for bar in written["bars"]:
        assert bar["what"] in lines[-1]
    assert [
        bar["met"] for bar in written["bars"] if bar["what"].startswith("head's peak memory")
    ] == [True]


def test_every_method_begins_at_the_same_loss_on_the_same_data(tmp_path: Path) -> None:
    batches = TINY.batches(tmp_path, seed=0)
    makers = cases(TINY, batches, tmp_path).items()
    # What is compiled begins there too (tests.training.test_objective.py); compiling takes long.
    losses = {name: make().step(0) for name, make in makers if not name.endswith(" compiled")}
    # Transformers' Trainer counts targets of labels that are not shifted yet: one more a sequence.
    assert losses == pytest.approx(dict.fromkeys(losses, losses["full"]), rel=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        {"variant": "full"},
        {"variant": "lora"},
        {"variant": "llama-pro"},
        {"variant": "preserve", "expansion": {"ratio": 0.125}},
        {"variant": "adapt", "collaboration": {"layers": [0]}, "expansion": {"ratio": 0.5}},
        {"variant": "route", "collaboration": {"layers": "top:1", "modules": ["mlp"]}},
    ],
    ids=str,
)
def test_no_more_products_are_computed_than_the_mathematics_asks_for(
    tmp_path: Path, method: dict[str, object]
) -> None:
    settings = MethodConfig.model_validate(method)
    case = ours("one", settings, TINY, TINY.batches(tmp_path, seed=0))
    counted = count_flops(lambda: case.step(0))
    assert counted == ideal_flops(TINY, settings)
    # What a plan counts is the same, but that a fused kernel computes its scores twice.
    ideal = ideal_flops_per_token(TINY.llama_config(), settings, TINY.sequence_length)
    per_token = step_cost(TINY.llama_config(), settings).flops(TINY.sequence_length)
    assert per_token == pytest.approx(ideal.total, rel=1e-9)


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
