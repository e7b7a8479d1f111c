import json
from operator import attrgetter
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from scale_cli.commands import plan as plan_module
from scale_cli.commands.plan import Plan, methods_beside, plan
from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.methods import METHODS
from scale_cli.runs.opened import Run
from scripts.benchmark.algebra import ideal_flops_per_token
from tests.benchmark.test_algebra import LLAMA_3_2_1B
from tests.command_line import Scale
from tests.one_step import write_config
from tests.vocabulary.tokenizers_at_hand import BROKEN, KOREAN, llama_2

SMALL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)
AS_IN_THE_PAPER = "corpus.sequence_length=8192"


def config_of(folder: Path, base: LlamaConfig, *overrides: str) -> RunConfig:
    """Write a base's config alone, and return a run's, whose text is not there."""
    base.save_pretrained(folder / "base")
    sizes = {
        "max_steps": 10,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "mixed_precision": "bf16",
    }
    corpus = {
        "sequence_length": 64,
        "sources": [{"name": "news", "path": str(folder / "absent.txt"), "language": "en"}],
    }
    path = write_config(folder, folder / "base", corpus=corpus, train=sizes)
    return load_config(path, ["model.dtype=bfloat16", *overrides])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the config's own method, and no other beside it."""
    monkeypatch.setattr(plan_module, "methods_beside", lambda _: [])


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Every method on a Llama as wide as Llama-3.2-1B, but of fewer layers, 8,192 tokens a window as in the paper."""
    folder = tmp_path_factory.mktemp("plan")
    base = LlamaConfig(**{**LLAMA_3_2_1B.to_dict(), "num_hidden_layers": 3})
    config = config_of(
        folder, base, "method={variant: route, expansion: {ratio: 0.125}}", AS_IN_THE_PAPER
    )
    return plan(config, flops=4e14, num_processes=2)


@pytest.mark.usefixtures("alone")
def test_llama_3_2_1b_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_3_2_1B, "method.variant=full", AS_IN_THE_PAPER)
    (full,) = plan(config, flops=4e14, num_processes=2).methods
    assert (full.parameters.num_frozen, full.parameters.num_trainable) == (0, 1_235_814_400)
    assert round(full.flops_per_token / 1e9, 2) == 9.03


def test_the_flops_are_those_that_the_mathematics_asks_for_and_the_time_is_theirs(
    every_method: Plan,
) -> None:
    assert every_method.methods[0].num_tokens == 10 * 4 * 8192
    assert {
        method.variant for method in every_method.methods
    } == METHODS.keys() and not every_method.refused
    for method in every_method.methods:
        ideal = ideal_flops_per_token(
            every_method.base_config,
            MethodConfig(variant=method.variant, expansion=every_method.config.method.expansion),
            8192,
        )
        assert method.flops_per_token == pytest.approx(ideal.total, rel=1e-12)
        assert method.flops.products == ideal.linear + ideal.head
        assert method.time_s == pytest.approx(method.num_tokens * ideal.total / (2 * 4e14))


def test_every_method_has_a_row_of_work_and_one_of_memory(every_method: Plan) -> None:
    lines = every_method.lines()
    assert len([line for line in lines if line.startswith("> ") and "route" in line]) == 2
    for variant in METHODS:
        assert sum(line[2:].startswith(f"{variant} ") for line in lines) == 2


def test_every_other_variant_stands_beside_the_configs(tmp_path: Path) -> None:
    for variant in METHODS:
        layers = "none" if variant == "preserve" else "top:1"
        method = MethodConfig.model_validate(
            {"variant": variant, "collaboration": {"layers": layers}, "lora": {"rank": 3}}
        )
        beside = methods_beside(method)
        assert {other.variant for other in beside} == METHODS.keys() - {variant}
        assert {*map(attrgetter("lora.rank"), beside)} == {3}
    distilled = MethodConfig.model_validate(
        {"variant": "preserve", "distillation": {"weight": 1.0}}
    )
    assert len(methods_beside(distilled)) == len(METHODS) - 1


def test_what_is_rarely_meant_and_what_is_not_there_is_warned_of_within_100_columns(
    every_method: Plan, alone: None, tmp_path: Path
) -> None:
    (absent,) = every_method.warnings
    assert absent.startswith("news: no file matches ") and "`scale run`" in absent
    made = plan(
        config_of(tmp_path, SMALL, "method.variant=preserve", "train.warmup_steps=99"), 1e12, 1
    )
    _, idle = made.warnings
    assert "train.warmup_steps" in idle
    for planned, warning in ((every_method, absent), (made, idle)):
        assert warning[:20] in " ".join(line.strip() for line in planned.lines())
        assert (
            max(len(line.replace(planned.config.model.base, "base")) for line in planned.lines())
            <= 100
        )


def test_a_method_that_the_base_is_too_small_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = MethodConfig.model_validate({"variant": "freeze", "freeze": {"num_layers": 9}})
    monkeypatch.setattr(
        plan_module, "methods_beside", lambda _: [freeze, MethodConfig(variant="preserve")]
    )
    made = plan(config_of(tmp_path, SMALL, "method.variant=full"), 1e12, 1)
    assert any("freeze" in line and "4 layers" in line for line in made.lines())
    full, preserve = made.methods
    assert full.memory.frozen == 0
    assert preserve.memory.frozen == 2 * preserve.parameters.num_frozen, "the base in bfloat16"


def test_a_tokenizer_that_loses_the_text_is_told_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "news.txt").write_text(KOREAN, encoding="utf-8")
    config = config_of(tmp_path, SMALL, f"corpus.sources.0.path={tmp_path / 'news.txt'}")
    for kind, is_told in ((llama_2, False), *((broken, True) for broken in BROKEN)):
        PreTrainedTokenizerFast(tokenizer_object=kind()).save_pretrained(tmp_path / "base")
        lines = plan_module._absent(Run(config))
        assert [line.partition(" (")[0] for line in lines] == ["news"] * is_told
        assert all("the tokenizer loses" in line for line in lines)


# The command line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config_of(tmp_path, SMALL)
    return tmp_path / "config.yaml"


def test_the_verb_prints_the_plan_for_people_or_as_json_and_writes_nothing(
    small: Path, scale: Scale, alone: None
) -> None:
    absent = "evaluation.benchmarks=[{name: questions, path: nowhere.yaml, language: ko}]"
    done = scale("plan", small, absent, "--flops", "4.0e14")
    assert done.exit_code == 0
    shown = done.stdout
    assert "questions: no such file: nowhere.yaml; the plan needs no text" in " ".join(
        shown.split()
    )
    assert (
        "400 TFLOP/s as stated" in shown
        and "10 steps x 4 windows x 64 tokens = 2,560 tokens" in shown
    )
    told = json.loads(scale("plan", small, absent, "--flops", "4.0e14", "--json").stdout)
    assert "base_config" not in told and told["methods"][0]["variant"] == "route"
    assert told["methods"][0]["num_tokens"] == 2560
    assert not (small.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["method.variant=lora", "method.lora.targets=[no_such_proj]"], ["method.lora.targets"]),
        (["corpus.sequence_length=100000"], ["corpus.sequence_length"]),
        (["--num-processes", "3"], ["train.global_batch_size", "3 processes"]),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_names_it(
    small: Path, scale: Scale, arguments: list[str], named: list[str]
) -> None:
    done = scale("plan", small, *arguments, "--flops", "1e12")
    assert done.stdout == "" and all(part in done.error() for part in named)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("variant", "max_steps", "is_told"),
    [("route", 2000, True), ("route", 10, False), ("full", 2000, False)],
)
def test_a_budget_at_which_full_fine_tuning_learned_as_much_is_told(
    tmp_path: Path, variant: str, max_steps: int, is_told: bool
) -> None:
    config = config_of(tmp_path, SMALL, f"method.variant={variant}", f"train.max_steps={max_steps}")
    planned = plan(config, flops=4e14, num_processes=1)
    assert ("tokens per parameter of the base" in " ".join(planned.lines())) == is_told
