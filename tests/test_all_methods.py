"""`scripts/all_methods.py`: every method is tried equally often, and its budgets are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scale_cli.config.grid import parse_grid
from scale_cli.config.load import load_config
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
    phases,
    tune,
    tuning_overrides,
    work_of_token,
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
        for words in phases(method, 125, Path("runs/x"), TUNING_SEED):
            for values in parse_grid(method.tried, paired=True).points:
                tried = load_config(PETITIONS, [*overrides, *words, *values])
                assert tried.method.variant == configs[name].method.variant


def test_every_run_and_every_tuning_has_the_steps_that_are_reported(configs: dict[str, RunConfig]) -> None:
    assert parsed(["x.yaml", "seed=1"]).tuned_share == 1.0
    for share in ("0.4", "1.1"):
        with pytest.raises(SystemExit):
            parsed(["--tuned-share", share])
    for name, method in METHODS.items():
        for steps in budgets(configs, name).values():
            words = phases(method, steps, Path("runs/x"), 0)
            lengths = [
                int(word.partition("=")[2]) for of in words for word in of if word.startswith("train.max_steps=")
            ]
            assert sum(lengths) == steps and len(words) == len(method.phases) and min(lengths) > 0
            assert words[-1][-1] == "output_dir=runs/x"


def test_a_later_phase_is_tuned_upon_its_own_try_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    asked: list[list[str]] = []

    def scale(*words: str) -> None:
        asked.append([*words])
        grid = parse_grid(words[2:-1], paired=True)
        load_config(PETITIONS, [*given, *grid.shared])  # as the verb does
        (place,) = [word.partition("=")[2] for word in grid.shared if word.startswith("output_dir=")]
        trials = [{"values": [*point], "folder": f"{place}/{number}"} for number, point in enumerate(grid.points)]
        (tmp_path / place / "report").mkdir(parents=True)
        write_json(tmp_path / place / "report" / "report.json", {"trials": trials[::-1]})

    monkeypatch.setattr(all_methods, "scale", scale)
    monkeypatch.chdir(tmp_path)
    best = tune(METHODS["elo"], PETITIONS, [*METHODS["elo"].overrides], Path("elo"), 125)
    points = parse_grid(METHODS["elo"].tried, paired=True).points
    assert tuple(best) == points[-1], "what the last phase ranked first, and nothing of where it began"
    of_each = ",".join(json.dumps(f"elo/tuning-phase1/{number}/final") for number in range(len(points)))
    assert asked[1][-2] == f"train.init_from={of_each}"


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
    for name, method in METHODS.items():
        of_method, work = budgets(configs, name), work_of_token(configs[name], method)
        assert of_method["tokens"] == configs[name].train.max_steps
        assert abs(of_method.get("work", of_method["tokens"]) * work - reference) <= work / 2
