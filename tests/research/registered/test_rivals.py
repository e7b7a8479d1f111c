"""`scripts/research/rivals.py`: every method is tried equally often, and its budgets are what they are called."""

from pathlib import Path

import pytest

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import training_sources
from scripts.research.rivals import (
    METHODS,
    SEEDS,
    TUNING_SEED,
    budgets,
    flops_per_token,
    paired,
    tuning_overrides,
    words_of_run,
)

PETITIONS = Path(__file__).parents[3] / "configs" / "petitions.yaml"


@pytest.fixture(scope="module")
def makes(shared_data: Path) -> dict[str, list[str]]:
    base = [f"model.base={shared_data / 'ckpt-eltec' / 'hf'}"]
    return {name: method.makes(PETITIONS, base) for name, method in METHODS.items()}


@pytest.fixture(scope="module")
def configs(makes: dict[str, list[str]]) -> dict[str, RunConfig]:
    return {name: load_config(PETITIONS, overrides) for name, overrides in makes.items()}


def test_every_method_is_tuned_by_equally_many_runs_and_not_on_what_is_trained_on_or_reported(
    configs: dict[str, RunConfig], makes: dict[str, list[str]]
) -> None:
    assert len({len(paired(method.tried)) for method in METHODS.values()}) == 1
    of_run = words_of_run(125, Path("runs/x"), TUNING_SEED)
    for name, config in configs.items():
        overrides = [*makes[name], *tuning_overrides(config)]
        for values in paired(METHODS[name].tried):
            tried = load_config(PETITIONS, [*overrides, *of_run, *values])
            assert tried.method.variant == config.method.variant
            assert tried.train.max_steps == 125
        tuned = load_config(PETITIONS, overrides)
        (held_back,), trained = tuned.evaluation.perplexity, training_sources(tuned)[0]
        assert held_back.path == trained.path
        assert (held_back.skip_documents, held_back.max_documents) == (0, trained.skip_documents)
        assert held_back.path not in {source.path for source in config.evaluation.perplexity}
    assert TUNING_SEED not in SEEDS


def test_equal_work_is_equal_to_half_a_step(configs: dict[str, RunConfig]) -> None:
    reference = configs["preserve"].train.max_steps * flops_per_token(configs["preserve"])
    for name in METHODS:
        of_method, work = budgets(configs, name), flops_per_token(configs[name])
        assert of_method["tokens"] == configs[name].train.max_steps
        assert abs(of_method.get("work", of_method["tokens"]) * work - reference) <= work / 2
