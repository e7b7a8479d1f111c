"""`scale mixture`: its runs have the shares they are named by, and what it predicts is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands import mixture as mixing
from scale_cli.commands.mixture import BudgetLaw, PowerLaw
from scale_cli.commands.sweep import SweepSummary, Trial
from scale_cli.config.load import Grid, load_config
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.storage.atomic import read_json
from scale_cli.storage.layout import RunFolder
from tests.torture.tiny_run import write_config_of_two_steps

KEPT, LEARNED, BASE = PowerLaw(0.4, 3.0, 1.5), PowerLaw(0.2, -0.5, 2.0), 1.6
# By the share of old text and of new; the first is forgotten the more the longer a run is.
KEPT_BY_BUDGET = BudgetLaw(1.9, -0.9, 0.5, 0.28, 0.02, 0.2, 1.0, ())
LEARNED_BY_BUDGET = BudgetLaw(1.0, 3.0, 0.3, 0.28, 0.4, 0.01, 0.5, ())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    texts = {name: str(tmp_path / f"{name}.txt") for name in ("one", "two", "held-out")}
    held_out = [
        {"name": role, "path": texts["held-out"], "language": "en", "role": role}
        for role in ("acquisition", "retention")
    ]
    sources = [
        {"name": "a", "path": texts["one"], "language": "ko", "weight": 3.0},
        {"name": "b", "path": texts["one"], "language": "ko"},
        {"name": "old", "path": texts["two"], "language": "en", "role": "replay"},
    ]
    return write_config_of_two_steps(tmp_path, "mixed", sources, held_out)


def follow_the_law(monkeypatch: pytest.MonkeyPatch, config: Path) -> list[Any]:
    """Let runs come to what laws say; return the shares that are run, and the steps where the values name them."""
    run: list[Any] = []

    def sweep(path: Path, grid: Grid, *_: object) -> SweepSummary:
        trials = []
        for values in grid.points:
            whole = load_config(path, [*grid.shared, *values])
            weights = [source.weight for source in whole.corpus.sources]
            assert weights[0] == pytest.approx(3 * weights[1]) and sum(weights) == pytest.approx(1.0)
            ratio, steps = round(weights[0] + weights[1], 4), whole.train.max_steps
            named = f"train.max_steps={steps}" in values
            place = (ratio, steps) if named else ratio
            if place not in run:  # what is finished is not run again
                run.append(place)
            kept = KEPT_BY_BUDGET.at(1 - ratio, steps) if named else KEPT.at(ratio)
            learned = LEARNED_BY_BUDGET.at(ratio, steps) if named else LEARNED.at(ratio)
            trials.append(Trial(values, "", 0.0, learned, kept - BASE, kept))
        return SweepSummary(path.parent, trials[::-1])

    monkeypatch.setattr(mixing, "sweep", sweep)
    return run


def test_the_ratio_that_the_tolerance_allows_is_predicted_and_measured(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = follow_the_law(monkeypatch, config)
    summary = mixing.mixture(config, [], [0.25, 0.5, 0.75, 1.0], 0.05, print)
    expected = (0.15 / 0.4) ** (1 / 3)
    assert summary.largest_ratio == pytest.approx(expected, rel=1e-2)
    assert run == [0.25, 0.5, 0.75, 1.0, pytest.approx(expected, rel=1e-2)]
    assert all(abs(error) < 1e-3 for error in summary.errors())
    assert "(not fitted)" in summary.lines()[-6] and "0.721" in "\n".join(summary.lines())
    written = read_json(summary.folder / "report.json")
    assert written["unseen"]["ratio"] == run[-1] and len(written["points"]) == 4
    for tolerance in (5.0, -1.0):  # where all is allowed, or nothing, the widest gap is measured
        run = follow_the_law(monkeypatch, config)
        mixing.mixture(config, [], [0.2, 0.3, 1.0], tolerance, print)
        assert run[-1] == 0.65


def test_a_longer_budget_is_predicted_and_measured_at_the_ratio_that_it_allows(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = follow_the_law(monkeypatch, config)
    summary = mixing.mixture(config, [], [0.25, 0.5, 0.75, 1.0], 0.16, print, [20, 40], 80)
    *fitted, (ratio, steps) = run
    assert fitted == [(ratio, steps) for steps in (20, 40) for ratio in (0.25, 0.5, 0.75, 1.0)]
    assert steps == 80 and KEPT_BY_BUDGET.at(1 - ratio, 80) == pytest.approx(BASE + 0.16, abs=5e-3)
    assert ratio == pytest.approx(summary.largest_ratio, abs=1e-3)
    assert all(abs(error) < 1e-2 for error in summary.errors())
    told, written = "\n".join(summary.lines()), read_json(summary.folder / "report.json")
    assert "b assumed: too few runs to tell" in told and f"at {ratio:.3g} in 80 steps, which it has not seen" in told
    assert written["unseen"]["steps"] == 80 and written["kept"]["assumed"] == ["b"]
    assert written["predicted"] == pytest.approx(
        [KEPT_BY_BUDGET.at(1 - ratio, 80), LEARNED_BY_BUDGET.at(ratio, 80)], rel=1e-2
    )
    assert f"| 80 | {ratio:.3g} (not fitted)" in (summary.folder / "report.md").read_text(encoding="utf-8")


def test_real_runs_are_mixed_and_fitted_each_to_the_end_of_its_own_budget_and_none_is_run_again(config: Path) -> None:
    asked: Any = (config, ["train.lr=1e-3"], [0.25, 0.5, 1.0], 0.05, print, [1, 2], 3)
    summary = mixing.mixture(*asked)
    runs = sorted((config.parent / "mixed").glob("weight=*"))
    trained = [read_json(run / "final" / "token_ledger.json")["old"]["num_trained"] for run in runs]
    assert len(runs) == 7 and trained.count(0) == 2, "all of it is new text in one of each budget"
    for run in runs:
        last = json.loads(RunFolder(run).metrics.read_text(encoding="utf-8").splitlines()[-1])
        steps = int(run.name.rpartition("=")[2])
        assert last["step"] == steps and last["lr"] == pytest.approx(1e-4 if steps > 1 else 1e-3)
    swept = read_json(config.parent / "mixed" / "report" / "report.json")
    assert {Path(trial["folder"]) for trial in swept["trials"]} == {*runs} and swept["runs"] == 7
    measured = {(point.ratio, point.steps): point for point in [*summary.points, summary.unseen]}
    assert len(measured) == 7 and all(
        point.kept - point.lost == pytest.approx(summary.base, abs=1e-6) for point in measured.values()
    )
    written = {path: path.stat().st_mtime_ns for run in runs for path in (run / "final").iterdir()}
    assert mixing.mixture(*asked) == summary
    assert written == {path: path.stat().st_mtime_ns for path in written}


@pytest.mark.parametrize(
    ("overrides", "ratios", "told"),
    [
        ((), [0.5, 1.0], "--ratios: give three"),
        ((), [0.0, 0.5, 1.0], "--ratios: give three"),
        (("corpus.sources.2.role=new",), [0.2, 0.5, 1.0], "none of the role replay has a weight"),
        (("corpus.sources.2.weight=0",), [0.2, 0.5, 1.0], "none of the role replay has a weight"),
        (("evaluation.perplexity.1.role=acquisition",), [0.2, 0.5, 1.0], "no corpus of role retention"),
        (
            ("method={variant: preserve, distillation: {weight: 1}}",),
            [0.33, 0.5, 1.0],
            "--ratios: 1 leaves no replay, on which alone method.distillation.weight",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    config: Path, overrides: tuple[str, ...], ratios: list[float], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        mixing.mixture(config, overrides, ratios, 0.05, print)


@pytest.mark.parametrize(
    ("steps", "predict", "told"),
    [
        ([], 80, "--steps and --predict-steps: give both"),
        ([20, 40], None, "--steps and --predict-steps: give both"),
        ([40], 80, "--steps: give two"),
        ([20.5, 40], 80, "--steps: give two .* whole"),
        ([0, 40], 80, "--steps: give two .* above 0"),
        ([20, 80], 80, "--predict-steps 80: give more than the 80"),
    ],
)
def test_budgets_from_which_nothing_is_foretold_are_refused(
    config: Path, steps: list[float], predict: int | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        mixing.mixture(config, [], [0.2, 0.5, 1.0], 0.05, print, steps, predict)
    assert not (config.parent / "mixed").exists()


def test_a_run_that_stopped_has_no_law(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(path: Path, grid: Grid, *_: object) -> SweepSummary:
        return SweepSummary(path.parent, [Trial(values, "x", failure="loss is nan") for values in grid.points])

    monkeypatch.setattr(mixing, "sweep", sweep)
    with pytest.raises(TrainingError, match="x: loss is nan, so no law can be fitted"):
        mixing.mixture(config, [], [0.25, 0.5, 1.0], 0.05, print)
