"""The biography benchmark of `scripts/research/`: what is asked, how it is judged, and the whole of it, small."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.config.load import load_checked
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.evaluation.results import HEADS_AND_RULES
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import ModelPair
from scale_cli.storage.atomic import read_json
from scripts.research.biography.accuracy import first_token_accuracy
from scripts.research.biography.config import BiographyConfig, ComparedMethod
from scripts.research.biography.people import NUM_NAMES
from scripts.research.biography.run import run_biography
from scripts.research.biography.tasks import Question
from tests.command_line import refused
from tests.widening import tiny_llama

CONFIGS = Path(__file__).parents[3] / "scripts" / "research" / "biography" / "configs"
SMALL = """
people: {pretraining: 6, biographies_each: 2, task_0: 4, task_1: 3}
model: {vocab_size: 512, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3,
        num_attention_heads: 2, num_key_value_heads: 2}
pretraining: {max_steps: 3, batch_size: 4}
task_0: {max_steps: 12, batch_size: 12, lr: 1.0e-2}
task_1: {max_steps: 5, batch_size: 6}
measure_every_steps: 2
methods:
  - {name: full, lr: 1.0e-2, method: {variant: full}}
  - {name: route, lr: 1.0e-2, method: {variant: route, collaboration: {layers: 'top:1'}}}
"""
RIVALS: list[dict[str, Any]] = [
    {"name": "adept", "method": {"variant": "adept", "adept": {"every_steps": 2, "num_blocks": 1}}},
    {
        "name": "mer",
        "method": {"variant": "full"},
        "replay": 0.5,
        "lookahead": {"every_steps": 2, "share": 0.5},
    },
    {"name": "held", "method": {"variant": "full"}, "decay_to_base": 0.1, "weight_decay": 0},
]


@pytest.fixture
def small(tmp_path: Path) -> BiographyConfig:
    """Few people, a few steps, two methods."""
    (tmp_path / "small.yaml").write_text(f"output_dir: {tmp_path / 'out'}\n{SMALL}")
    return load_checked(BiographyConfig, tmp_path / "small.yaml")


def with_rivals(config: BiographyConfig, *rivals: dict[str, Any]) -> BiographyConfig:
    added = [ComparedMethod.model_validate({"lr": 1.0e-2, **rival}) for rival in rivals]
    return config.model_copy(update={"methods": [*config.methods, *added]})


def test_the_shipped_configs_load_and_every_method_of_the_paper_runs_by_default() -> None:
    for path in CONFIGS.glob("*.yaml"):
        people = load_checked(BiographyConfig, path).people
        assert people.pretraining + people.task_1 <= NUM_NAMES
    variants = [one.method.variant for one in BiographyConfig(output_dir=Path("out")).methods]
    assert variants == ["full", "lora", "llama-pro", "preserve", "adapt", "route"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("people.task_0=300", "people: task_0 300 is more than pretraining"),
        ("methods=[{name: a, lr: 1, method: {}}, {name: a, lr: 1, method: {}}]", "methods: two"),
        ("methods.0.method.vocabulary={}", "vocabulary: the benchmark's tokenizer"),
        ("methods.0.method={distillation: {weight: 1}}", "distillation.weight: the benchmark"),
        ("methods.0.lookahead={every_steps: 1000}", "full: train.lookahead.every_steps: 1,000"),
        (
            "methods.0={name: p, lr: 1, method: {}, decay_to_base: 0.1, weight_decay: 0}",
            "trains none of",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    small: BiographyConfig, tmp_path: Path, override: str, named: str
) -> None:
    with refused(ConfigError, re.escape(named)):
        load_checked(BiographyConfig, tmp_path / "small.yaml", [override])


def answer_by_hand(
    base: torch.nn.Module, trained: torch.nn.Module, asked: Question, threshold: float
) -> dict[str, int]:
    """One question, no padding, no batch; Bayes' rule token by token in Python's own floats."""
    ids = torch.tensor([asked.prompt])
    with torch.no_grad():
        logits = [model(ids).logits[0].double() for model in (base, trained)]
    of_base, of_trained = (head.softmax(-1) for head in logits)
    weight = 0.5
    for position, token in enumerate(asked.prompt[1:]):
        said, other = weight * of_base[position, token], (1 - weight) * of_trained[position, token]
        weight = float(said / (said + other))
    mixed = weight * of_base[-1] + (1 - weight) * of_trained[-1]
    cosine = torch.cosine_similarity(logits[0][-1], logits[1][-1], dim=0)
    heads = [int(head[-1].argmax()) for head in logits]
    return {
        "base": heads[0],
        "trained": heads[1],
        "posterior": int(mixed.argmax()),
        "cosine": heads[0] if cosine >= threshold else heads[1],
    }


def test_accuracy_is_what_one_question_at_a_time_gives_for_heads_and_rules() -> None:
    base, trained = tiny_llama(), tiny_llama(seed=1)
    router, draw = RouterConfig(threshold=0.1), random.Random(0)
    questions, by_hand = [], []
    for index in range(40):
        asked = Question([draw.randrange(61) for _ in range(draw.randint(2, 9))], [0])
        by_hand.append(answer_by_hand(base, trained, asked, router.threshold))
        questions.append(Question(asked.prompt, [by_hand[-1][HEADS_AND_RULES[index % 4]], 0]))
    shares = first_token_accuracy(ModelPair(base, trained), questions, router, "no")
    for name, share in shares.items():
        pairs = zip(by_hand, questions, strict=True)
        right = sum(said[name] == asked.answer[0] for said, asked in pairs)
        assert share == pytest.approx(right / len(questions))
    assert len(set(shares.values())) > 1  # or the heads and rules would not have been told apart


def test_the_whole_benchmark_runs_is_not_run_twice_and_refuses_other_settings(
    small: BiographyConfig,
) -> None:
    small = with_rivals(small, *RIVALS)
    results = run_biography(small, print)
    for result in results:
        assert result.steps == [0, 2, 4, 5]
        for accuracy in (result.task_0, result.task_1):
            assert accuracy.keys() == set(HEADS_AND_RULES)
            assert all(len(shares) == 4 for shares in accuracy.values())
            # Nothing is trained at step 0: both heads and both rules are the base.
            assert len({shares[0] for shares in accuracy.values()}) == 1
            assert len(set(accuracy["base"])) == 1  # and the base never changes
    report = small.output_dir / "report"
    assert "| route (posterior) |" in (report / "report.md").read_text()
    assert (report / "accuracy.svg").read_text().count("route (cosine)") == 1
    names = [method["name"] for method in read_json(report / "report.json")["methods"]]
    assert names == ["full", "route", "adept", "mer", "held"]

    before = {file: file.stat().st_mtime_ns for file in small.output_dir.glob("methods/*.json")}
    assert run_biography(small, print) == results
    assert before == {file: file.stat().st_mtime_ns for file in before}

    fewer = small.people.model_copy(update={"task_1": 2})
    with pytest.raises(RunFolderError, match=r"other settings \(people\)"):
        run_biography(small.model_copy(update={"people": fewer}), print)
