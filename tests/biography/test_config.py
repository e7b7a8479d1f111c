from __future__ import annotations

from pathlib import Path

import pytest

from scale_cli.config.load import load_checked
from scale_cli.errors import ConfigError
from scripts.biography.config import BiographyConfig
from scripts.biography.people import NUM_NAMES

SHIPPED = sorted((Path(__file__).parents[2] / "scripts" / "biography" / "configs").glob("*.yaml"))


def load_text(folder: Path, text: str, *overrides: str) -> BiographyConfig:
    file = folder / "biography.yaml"
    file.write_text(text, encoding="utf-8")
    return load_checked(BiographyConfig, file, list(overrides))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_loads_and_its_people_can_be_named(path: Path) -> None:
    people = load_checked(BiographyConfig, path).people
    assert people.pretraining + people.task_1 <= NUM_NAMES


def test_configs_are_shipped() -> None:
    assert SHIPPED


def test_every_method_of_the_paper_runs_by_default(tmp_path: Path) -> None:
    config = load_text(tmp_path, "output_dir: out")
    variants = [compared.method.variant for compared in config.methods]
    assert variants == ["full", "lora", "llama-pro", "preserve", "adapt", "route"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("people.task_0=300", "people: task_0 300 is more than pretraining 200"),
        ("people.pretrained=3", "people.pretrained: unknown key (did you mean pretraining?)"),
        ("model.hidden_size=130", "model: num_key_value_heads divides"),
        ("methods=[]", "methods: "),
        (
            "methods=[{name: a, lr: 1, method: {variant: full}}, {name: a, lr: 1, method: {variant: lora}}]",
            "methods: two",
        ),
        ("methods.0.method.variant=fuller", "methods: "),
        ("methods=[{name: a, lr: 1, method: {distillation: {weight: 1}}}]", "distillation.weight: the benchmark"),
        (
            "methods=[{name: a, lr: 1, method: {expansion: {codes: cooccurrence}}}]",
            "expansion.codes: cooccurrence is counted in a run's corpus",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, override: str, named: str) -> None:
    text = "output_dir: out\n"
    if override.startswith("methods.0"):
        text += "methods: [{name: a, lr: 1.0, method: {variant: full}}]\n"
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, override)
    assert named.rstrip(": ") in str(caught.value)
