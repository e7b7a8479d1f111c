import re
from pathlib import Path

import pytest

from scale_cli.config.load import load_checked
from scale_cli.errors import ConfigError
from scripts.research.biography.config import BiographyConfig
from scripts.research.biography.people import NUM_NAMES
from tests.command_line import refused

SHIPPED = sorted(
    (Path(__file__).parents[4] / "scripts" / "research" / "biography" / "configs").glob("*.yaml")
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_loads_and_its_people_can_be_named(path: Path) -> None:
    people = load_checked(BiographyConfig, path).people
    assert people.pretraining + people.task_1 <= NUM_NAMES


def test_every_method_of_the_paper_runs_by_default() -> None:
    variants = [
        compared.method.variant for compared in BiographyConfig(output_dir=Path("out")).methods
    ]
    assert SHIPPED and variants == ["full", "lora", "llama-pro", "preserve", "adapt", "route"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("people.task_0=300", "people: task_0 300 is more than pretraining 200"),
        ("model.hidden_size=130", "model: num_key_value_heads divides"),
        ("methods=[{name: a, lr: 1, method: {}}, {name: a, lr: 1, method: {}}]", "methods: two"),
        ("methods.0.method.vocabulary={}", "vocabulary: the benchmark's tokenizer"),
        ("methods.0.method={distillation: {weight: 1}}", "distillation.weight: the benchmark"),
        (
            "methods.0.lookahead={every_steps: 1000}",
            "methods: a: train.lookahead.every_steps: 1,000 is beyond",
        ),
        (
            "methods.0={name: p, lr: 1, method: {variant: preserve}, decay_to_base: 0.1, weight_decay: 0}",
            "preserve trains none of",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, override: str, named: str) -> None:
    file = tmp_path / "biography.yaml"
    file.write_text(
        "output_dir: out\nmethods: [{name: a, lr: 1.0, method: {variant: full}}]\n",
    )
    with refused(ConfigError, re.escape(named)):
        load_checked(BiographyConfig, file, [override])
