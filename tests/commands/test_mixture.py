"""`scale mixture`: its runs have the shares they are named by, the law is found again, what it predicts is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scale_cli.commands import mixture as mixing
from scale_cli.commands.mixture import PowerLaw, fit_power_law
from scale_cli.commands.sweep import SweepSummary, Trial
from scale_cli.config.load import Grid, load_config
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.storage.atomic import read_json
from tests.torture.tiny_run import write_config_of_two_steps

KEPT, LEARNED, BASE = PowerLaw(0.4, 3.0, 1.5), PowerLaw(0.2, -0.5, 2.0), 1.6
RATIOS = [0.1, 0.25, 0.5, 0.75, 1.0]


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


def follow_the_law(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let runs come to what the laws say; return the shares that are run."""
    run: list[float] = []

    def sweep(path: Path, grid: Grid, *_: object) -> SweepSummary:
        trials = []
        for values in grid.points:
            weights = [source.weight for source in load_config(path, [*grid.shared, *values]).corpus.sources]
            assert weights[0] == pytest.approx(3 * weights[1]) and sum(weights) == pytest.approx(1.0)
            ratio = round(weights[0] + weights[1], 4)
            if ratio not in run:  # what is finished is not run again
                run.append(ratio)
            kept, learned = KEPT.at(ratio), LEARNED.at(ratio)
            trials.append(Trial(values, "", 0.0, learned, kept - BASE, kept))
        return SweepSummary(path.parent, trials[::-1])

    monkeypatch.setattr(mixing, "sweep", sweep)
    return run


def test_the_ratio_that_the_tolerance_allows_is_predicted_and_measured(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = follow_the_law(monkeypatch)
    summary = mixing.mixture(config, [], [0.25, 0.5, 0.75, 1.0], 0.05, print)
    expected = (0.15 / 0.4) ** (1 / 3)
    assert summary.largest_ratio == pytest.approx(expected, rel=1e-2)
    assert run == [0.25, 0.5, 0.75, 1.0, pytest.approx(expected, rel=1e-2)]
    assert all(abs(error) < 1e-3 for error in summary.errors())
    assert "(not fitted)" in summary.lines()[-6] and "0.721" in "\n".join(summary.lines())
    written = read_json(summary.folder / "report.json")
    assert written["unseen"]["ratio"] == run[-1] and len(written["points"]) == 4
    for tolerance in (5.0, -1.0):  # where all is allowed, or nothing, the widest gap is measured
        run = follow_the_law(monkeypatch)
        mixing.mixture(config, [], [0.2, 0.3, 1.0], tolerance, print)
        assert run[-1] == 0.65


def test_real_runs_have_their_shares_and_none_is_run_again(config: Path) -> None:
    summary = mixing.mixture(config, [], [0.25, 0.5, 1.0], 0.05, print)
    runs = sorted((config.parent / "mixed").glob("weight=*"))
    trained = [read_json(run / "final" / "token_ledger.json")["old"]["num_trained"] for run in runs]
    assert len(runs) == 4 and trained.count(0) == 1, "all of it is new text in one"
    swept = read_json(config.parent / "mixed" / "report" / "report.json")
    assert {Path(trial["folder"]) for trial in swept["trials"]} == {*runs} and swept["runs"] == 4
    written = {path: path.stat().st_mtime_ns for run in runs for path in (run / "final").iterdir()}
    assert mixing.mixture(config, [], [0.25, 0.5, 1.0], 0.05, print) == summary
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


def test_a_run_that_stopped_has_no_law(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(path: Path, grid: Grid, *_: object) -> SweepSummary:
        return SweepSummary(path.parent, [Trial(values, "x", failure="loss is nan") for values in grid.points])

    monkeypatch.setattr(mixing, "sweep", sweep)
    with pytest.raises(TrainingError, match="x: loss is nan, so no law can be fitted"):
        mixing.mixture(config, [], [0.25, 0.5, 1.0], 0.05, print)


@settings(deadline=None, max_examples=15)
@given(st.floats(0.05, 2.0), st.floats(0.2, 6.0), st.booleans(), st.floats(0.5, 3.0), st.floats(0.12, 0.95))
def test_a_law_is_recovered_from_its_own_losses(a: float, s: float, falls: bool, b: float, unseen: float) -> None:
    law = PowerLaw(a, -s / 4 if falls else s, b)
    fitted = fit_power_law(RATIOS, [law.at(ratio) for ratio in RATIOS])
    assert fitted.at(unseen) == pytest.approx(law.at(unseen), rel=2e-3)
    for ratio in RATIOS:
        assert fitted.at(ratio) == pytest.approx(law.at(ratio), rel=1e-3)


@given(st.floats(0.05, 2.0), st.floats(0.2, 6.0), st.floats(0.5, 3.0), st.floats(0.01, 1.0))
def test_the_largest_ratio_is_where_the_law_meets_the_loss(a: float, s: float, b: float, ratio: float) -> None:
    law = PowerLaw(a, s, b)
    assume(a * ratio**s > 1e-6)
    assert law.largest_ratio(law.at(ratio)) == pytest.approx(ratio, rel=1e-3)
    assert law.largest_ratio(law.at(1.0) + 1.0) == 1.0
    assert law.largest_ratio(b - 0.1) is None


def test_losses_that_do_not_depend_on_the_ratio_are_a_law_too() -> None:
    fitted = fit_power_law(RATIOS, [1.5] * 5)
    assert all(fitted.at(ratio) == pytest.approx(1.5, rel=1e-6) for ratio in RATIOS)
    assert fitted.largest_ratio(1.55) == 1.0
