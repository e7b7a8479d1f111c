"""`scripts/all_methods.py`: every method is tried equally often, and its budgets are what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_cli.config.grid import parse_grid
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scripts.all_methods import METHODS, budgets, flops_per_token, tuning_overrides

PETITIONS = Path(__file__).parents[1] / "configs" / "petitions.yaml"


@pytest.fixture(scope="module")
def configs(shared_data: Path) -> dict[str, RunConfig]:
    base = f"model.base={shared_data / 'ckpt-eltec' / 'hf'}"
    return {name: load_config(PETITIONS, [*method.overrides, base]) for name, method in METHODS.items()}


def test_every_method_is_tuned_by_equally_many_runs_and_every_one_is_a_config(configs: dict[str, RunConfig]) -> None:
    grids = {name: parse_grid([*method.overrides, *method.tried], paired=True) for name, method in METHODS.items()}
    assert len({len(grid.points) for grid in grids.values()}) == 1
    for name, grid in grids.items():
        for values in grid.points:
            tried = load_config(PETITIONS, [*grid.shared, *values, *tuning_overrides(configs[name])])
            assert tried.method == configs[name].method


def test_nothing_is_tuned_on_what_is_trained_on_or_reported(configs: dict[str, RunConfig]) -> None:
    config = configs["full"]
    tuned = load_config(PETITIONS, tuning_overrides(config))
    (held_back,), (trained,) = tuned.evaluation.perplexity, tuned.corpus.sources
    assert held_back.path == trained.path
    assert (held_back.skip_documents, held_back.max_documents) == (0, trained.skip_documents)
    assert held_back.path not in {source.path for source in config.evaluation.perplexity}


def test_equal_work_is_equal_to_half_a_step(configs: dict[str, RunConfig]) -> None:
    work = {name: flops_per_token(config) for name, config in configs.items()}
    reference = configs["preserve"].train.max_steps * work["preserve"]
    for name in METHODS:
        of_method = budgets(configs, name)
        assert of_method["tokens"] == configs[name].train.max_steps
        assert abs(of_method.get("work", of_method["tokens"]) * work[name] - reference) <= work[name] / 2
