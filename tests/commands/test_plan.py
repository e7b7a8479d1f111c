import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from scale_cli.commands.plan import Plan, plan
from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.report import quantity
from scripts.benchmark.algebra import ideal_flops_per_token
from tests.benchmark.test_algebra import LLAMA_3_2_1B
from tests.command_line import Scale
from tests.planning.test_step import TRAINED
from tests.small_runs import write_config

SMALL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)
THREE_LAYERS = LlamaConfig(**{**LLAMA_3_2_1B.to_dict(), "num_hidden_layers": 3})
AS_IN_THE_PAPER = "corpus.sequence_length=8192"


def config_of(folder: Path, base: LlamaConfig, *overrides: str) -> RunConfig:
    """Write a base's config alone, and return a run's, whose text is not there."""
    base.save_pretrained(folder / "base")
    train = "{max_steps: 10, global_batch_size: 4, micro_batch_size: 2, mixed_precision: bf16}"
    path = write_config(folder, folder / "base", corpus={"sequence_length": 64}, train=train)
    (folder / "news.txt").unlink()
    return load_config(path, ["model.dtype=bfloat16", *overrides])


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Every method on a Llama as wide as Llama-3.2-1B, but of fewer layers, 8,192 tokens a window."""
    folder = tmp_path_factory.mktemp("plan")
    route = "method={variant: route, expansion: {ratio: 0.125}}"
    config = config_of(folder, THREE_LAYERS, route, "train.optimiser=adamw", AS_IN_THE_PAPER)
    return plan(config, flops=4e14, num_processes=2, compared=True)


def test_llama_3_2_1b_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_3_2_1B, "method.variant=full", AS_IN_THE_PAPER)
    (full,) = plan(config, flops=4e14, num_processes=2).methods
    assert (full.num_frozen, full.num_trainable, full.num_served) == (0, *[1_235_814_400] * 2)
    assert round(full.flops_per_token / 1e9, 2) == 9.03


def test_the_flops_are_those_that_the_mathematics_asks_for_and_the_time_is_theirs(
    every_method: Plan,
) -> None:
    assert every_method.methods[0].num_tokens == 10 * 4 * 8192
    assert every_method.methods[0].variant == "route"
    assert {method.variant for method in every_method.methods} == {*TRAINED}
    for method in every_method.methods:
        asked = MethodConfig(variant=method.variant, expansion=every_method.config.method.expansion)
        ideal = ideal_flops_per_token(THREE_LAYERS, asked, 8192)
        assert method.flops_per_token == pytest.approx(ideal.total, rel=1e-12)
        assert method.time_s == pytest.approx(method.num_tokens * ideal.total / (2 * 4e14))


def test_all_shows_every_method_in_lines_of_100_columns_and_otherwise_only_the_own(
    every_method: Plan,
) -> None:
    lines = every_method.lines()
    for variant in TRAINED:
        assert sum(line[2:].startswith(f"{variant} ") for line in lines) == 2
    shown = [line.replace(every_method.config.model.base, "base") for line in lines]
    assert max(map(len, shown)) <= 100
    own = plan(every_method.config, flops=4e14, num_processes=2)
    assert [method.variant for method in own.methods] == ["route"]
    assert "--all" in " ".join(own.lines())


def test_what_is_not_there_and_what_is_rarely_meant_is_warned_of(tmp_path: Path) -> None:
    asked = ["train.warmup_steps=99", "evaluation.benchmarks=[{name: arc_esay}]"]
    config = config_of(tmp_path, SMALL, *asked)
    absent, misspelt, idle = plan(config, 1e12, 1).warnings
    assert absent.startswith("news: no file matches ") and "`scale run`" in absent
    assert "no task 'arc_esay' (did you mean arc_easy?)" in misspelt
    assert "train.warmup_steps" in idle


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ["method={variant: lora, expansion: {ratio: 0.5}, collaboration: {layers: all}}"],
            ["method.collaboration", "method.expansion"],
        ),
        (["method={variant: lora, lora: {rank: 8}}"], []),
        (["method={variant: route, lora: {rank: 8}, expansion: {ratio: 0.5}}"], ["method.lora"]),
        (["train.eval_max_tokens=100", "train.eval_every_steps=null"], ["train.eval_max_tokens"]),
        (["corpus.sources.0.split=validation"], ["news: split"]),
    ],
)
def test_a_setting_that_does_nothing_is_warned_of(
    tmp_path: Path, asked: list[str], told: list[str]
) -> None:
    config = config_of(tmp_path, SMALL, *asked)
    found = [line for line in plan(config, 1e12, 1).warnings if "no effect" in line]
    assert [line.startswith(key) for line, key in zip(found, told, strict=True)] == [True] * len(
        told
    )


def test_bfloat16_on_a_cpu_without_it_is_warned_of_before_anything_is_prepared_or_trained(
    scale: Scale, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    config = write_config(tmp_path, base, train="{max_steps: 1, mixed_precision: bf16}")
    slow = "train.mixed_precision=no is many times faster here"
    assert slow in " ".join(scale("plan", config).stdout.split())
    assert slow in scale("upscale", config).stdout
    assert not any(slow in line for line in plan(load_config(config), 1e12, 1).warnings)


def test_a_method_that_the_base_is_too_small_for_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, "method.freeze.num_layers=9", "method.variant=full")
    made = plan(config, 1e12, 1, compared=True)
    assert "4 layers" in made.refused["freeze"]
    assert any("freeze" in line and "not possible" in line for line in made.lines())


def test_the_size_served_the_real_ratio_evaluation_and_disk_are_told(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("word " * 3000, encoding="utf-8")
    held = f"{{name: held, path: {tmp_path}/held.txt, language: en, role: retention}}"
    six_heads = LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=3, dtype="bfloat16"
    )
    config = config_of(tmp_path, six_heads, f"evaluation.perplexity=[{held}]")
    made = plan(config, 1e12, 1)
    shown = " ".join(" ".join(made.lines()).split())
    assert "ratio 0.25 is 0.333 in whole heads" in shown
    assert f"{quantity(made.methods[0].num_served)} parameters as a plain model" in shown
    in_streams = made.methods[0].num_frozen + made.methods[0].num_trainable
    assert in_streams < made.methods[0].num_served, "a plain model stores zero blocks too"
    said = f"in bfloat16, {quantity(in_streams)} in two streams (format transformers); ratio"
    assert said in shown, "an export has the dtype of the base's own files"
    # A document of 5,000 tokens, in windows of the base's 2,048 positions that overlap by half.
    assert made.estimate.evaluated_tokens == 4 * 2048 and made.estimate.evaluation_s > 0
    assert made.disk_bytes > made.methods[0].num_served * 2


def test_a_run_that_widens_nothing_keeps_its_weights_once_and_its_exports_in_their_dtype(
    tmp_path: Path,
) -> None:
    small = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    whole = plan(config_of(tmp_path, small, "method.variant=full", "export.dtype=float16"), 1e12, 1)
    memory = whole.methods[0].memory
    served = whole.methods[0].num_served
    assert whole.disk_bytes == memory.trainable + memory.checkpoint + 2 * served

    form = ("export.format=transformers", "export.dtype=bfloat16")
    wide = plan(config_of(tmp_path, small, "method.variant=adapt", *form), 1e12, 1)
    (own,) = wide.methods
    in_streams = own.num_frozen + own.num_trainable
    assert wide.disk_bytes == 2 * own.memory.trainable + own.memory.checkpoint + 2 * in_streams


def test_a_size_far_above_what_was_asked_for_is_a_warning(tmp_path: Path) -> None:
    one_head = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=1)
    (warning,) = (
        line for line in plan(config_of(tmp_path, one_head), 1e12, 1).warnings if "ratio" in line
    )
    assert warning.startswith("method.expansion.ratio: 0.25 asks for 0.25 more key/value heads")


# The command line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config_of(tmp_path, SMALL)
    return tmp_path / "config.yaml"


def test_the_verb_prints_the_plan_for_people_or_as_json_and_writes_nothing(
    small: Path, scale: Scale
) -> None:
    absent = "evaluation.benchmarks=[{name: questions, path: nowhere.yaml, language: ko}]"
    done = scale("plan", small, absent, "--flops", "4.0e14")
    assert done.exit_code == 0
    shown = done.stdout
    assert "questions: no such file: nowhere.yaml; the plan does without" in " ".join(shown.split())
    assert "400 TFLOP/s as stated" in shown
    assert "10 steps x 4 windows x 64 tokens = 2,560 tokens" in shown
    told = json.loads(scale("plan", small, absent, "--flops", "4.0e14", "--json").stdout)
    assert "base_config" not in told and told["methods"][0]["variant"] == "route"
    assert told["methods"][0]["num_tokens"] == 2560
    assert not (small.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("method.variant=lora method.lora.targets=[q_proj,wrong]", "the base has no wrong"),
        ("corpus.sequence_length=100000", "corpus.sequence_length"),
        ("--num-processes 3", "train.global_batch_size"),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_names_it(
    small: Path, scale: Scale, arguments: str, named: str
) -> None:
    done = scale("plan", small, *arguments.split(), "--flops", "1e12")
    assert done.stdout == "" and named in done.error()


def test_a_plan_of_a_widening_alone_says_that_full_fine_tuning_learns_more(tmp_path: Path) -> None:
    for variant in ("route", "full"):
        planned = plan(config_of(tmp_path, SMALL, f"method.variant={variant}"), 4e14, 1)
        told = "tokens per parameter of the base" in " ".join(planned.lines())
        assert told == (variant == "route")
