"""`scripts/all_methods.py`: every method is tried equally often, and its budgets are what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_cli.config.load import load_config, parse_grid
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import training_sources
from scale_cli.storage.atomic import write_json
from scripts import all_methods
from scripts.all_methods import (
    METHODS,
    SEEDS,
    TUNING_SEED,
    budgets,
    flops_per_token,
    parsed,
    tune,
    tuning_overrides,
    words_of_run,
)

PETITIONS = Path(__file__).parents[1] / "configs" / "petitions.yaml"


@pytest.fixture(scope="module")
def given(shared_data: Path) -> list[str]:
    return [f"model.base={shared_data / 'ckpt-eltec' / 'hf'}"]


@pytest.fixture(scope="module")
def configs(given: list[str]) -> dict[str, RunConfig]:
    return {name: load_config(PETITIONS, method.makes(PETITIONS, given)) for name, method in METHODS.items()}


def test_every_method_is_tuned_by_equally_many_runs_and_every_one_is_a_config(
    configs: dict[str, RunConfig], given: list[str]
) -> None:
    assert len({len(parse_grid(method.tried, paired=True).points) for method in METHODS.values()}) == 1
    for name, method in METHODS.items():
        overrides = [*method.makes(PETITIONS, given), *tuning_overrides(configs[name])]
        for values in parse_grid(method.tried, paired=True).points:
            tried = load_config(PETITIONS, [*overrides, *words_of_run(125, Path("runs/x"), TUNING_SEED), *values])
            assert tried.method.variant == configs[name].method.variant and tried.train.max_steps == 125


def test_methods_are_tuned_at_half_the_steps_that_are_reported_or_more() -> None:
    assert parsed(["x.yaml", "seed=1"]).tuned_share == 1.0
    for share in ("0.4", "1.1"):
        with pytest.raises(SystemExit):
            parsed(["--tuned-share", share])


def test_the_best_of_what_is_tried_is_what_its_sweep_ranked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    points = parse_grid(METHODS["full"].tried, paired=True).points

    def scale(*words: str) -> None:
        assert [*words] == ["sweep", str(PETITIONS), *given, *run, *METHODS["full"].tried, "--paired"]
        (tmp_path / "full" / "tuning" / "report").mkdir(parents=True)
        trials = [{"values": [*point]} for point in points[::-1]]
        write_json(tmp_path / "full" / "tuning" / "report" / "report.json", {"trials": trials})

    run = words_of_run(125, Path("full/tuning"), TUNING_SEED)
    monkeypatch.setattr(all_methods, "scale", scale)
    monkeypatch.chdir(tmp_path)
    assert tuple(tune(METHODS["full"], PETITIONS, given, Path("full"), 125)) == points[-1]


def test_nothing_is_tuned_on_what_is_trained_on_or_reported(configs: dict[str, RunConfig], given: list[str]) -> None:
    for name, config in configs.items():
        tuned = load_config(PETITIONS, [*METHODS[name].makes(PETITIONS, given), *tuning_overrides(config)])
        (held_back,), trained = tuned.evaluation.perplexity, training_sources(tuned)[0]
        assert held_back.path == trained.path
        assert (held_back.skip_documents, held_back.max_documents) == (0, trained.skip_documents)
        assert held_back.path not in {source.path for source in config.evaluation.perplexity}
    assert TUNING_SEED not in SEEDS


def test_replay_is_a_quarter_of_the_windows_or_measured_on_alone(configs: dict[str, RunConfig]) -> None:
    for name, share in (("full", None), ("full-replay", 0.25), ("full-mer", 0.25), ("adept", 0.0)):
        sources = configs[name].corpus.sources
        weights = [source.weight for source in sources if source.role == "replay"]
        assert [weight / sum(source.weight for source in sources) for weight in weights] == (
            [] if share is None else [pytest.approx(share)]
        )


def test_equal_work_is_equal_to_half_a_step(configs: dict[str, RunConfig]) -> None:
    reference = configs["preserve"].train.max_steps * flops_per_token(configs["preserve"])
    for name in METHODS:
        of_method, work = budgets(configs, name), flops_per_token(configs[name])
        assert of_method["tokens"] == configs[name].train.max_steps
        assert abs(of_method.get("work", of_method["tokens"]) * work - reference) <= work / 2
