"""How a run went: what its page shows of the log, of samples and of the cost."""

import sys
from pathlib import Path

import pytest

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.evaluation.results import Report
from scale_cli.report import duration, quantity
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import read_json
from scale_cli.training.history import (
    draw,
    held_out_curves,
    history_of,
    samples,
    training_curves,
)
from scale_cli.training.metrics_log import BITS, SAMPLES, MetricsRecord, read_records
from tests.small_runs import changed, petitions_run


def evaluated(step: int, trained: float | None, said: str, prompt: str = "Once") -> MetricsRecord:
    return {
        "step": step,
        BITS: {"tales": {"base": 1.0, "trained": trained, "routed": 0.9}},
        SAMPLES: {"tales": {"prompt": prompt, "continuation": said, "base": "before\nall"}},
    }


def logged(step: int, **losses: float) -> MetricsRecord:
    return {"step": step, "loss": sum(losses.values()), "loss_by_source": losses}


LOG: list[MetricsRecord] = [
    logged(1, news=3.0),
    {"step": 2, "skipped": "not finite"},
    evaluated(2, None, "upon\n\na  time"),
    logged(3, news=2.0, replay=1.5),
    evaluated(4, 0.8, "more\ufffd"),
]


def test_curves_are_the_logs_own_losses_of_every_source_and_head() -> None:
    by_source = {curve.label: curve.points for curve in training_curves(LOG)}
    assert by_source == {"news": [(1, 3.0), (3, 2.0)], "replay": [(3, 1.5)]}
    (whole,) = training_curves([{"step": 1, "loss": 3.5}])
    assert (whole.label, whole.points) == ("loss", [(1, 3.5)])
    heads = {curve.label: curve.points for curve in held_out_curves(LOG, "routed")["tales"]}
    assert heads == {
        "routed": [(2, 0.9), (4, 0.9)],
        "trained": [(2, None), (4, 0.8)],
        "base": [(2, 1.0), (4, 1.0)],
    }
    alone = held_out_curves(LOG, "trained")["tales"]
    assert [curve.label for curve in alone] == ["trained", "base"]
    assert not training_curves([]) and not held_out_curves([], "routed")


def test_a_figure_has_a_panel_for_training_and_one_for_every_text() -> None:
    figure = draw(LOG, "routed", 4)
    for label in ("trained on", "tales", "news", "replay", "routed", "bits/byte"):
        assert f">{label}</text>" in figure
    assert ">measured</text>" not in figure and ">measured</text>" in draw(LOG, "routed", 2)
    assert draw(LOG, "routed", 4) == figure, "the same log, the same bytes"
    assert not draw([], "routed", 4)
    long = draw([logged(step, news=1.0) for step in range(100_000)], "trained", 99_999)
    assert len(long) < 100_000


def test_a_prompt_stands_beside_the_bases_the_first_and_the_last_continuation() -> None:
    (table,) = samples(LOG)
    assert [str(title) for title in table.titles] == ["prompt, tales", "Once"]
    of_base = ["the base", "before all"]
    assert table.rows == [of_base, ["after step 2", "upon a time"], ["after step 4", "more"]]
    (table,) = samples([*LOG, evaluated(6, 0.7, "", prompt="Another")])
    assert table.rows == [of_base, ["after step 6", "—"]], "of another prompt nothing is known"
    assert not samples([])


def test_the_page_of_a_run_shows_its_curve_its_samples_its_cost_and_its_date(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(
        petitions_run(shared_data, tmp_path / "run"),
        "train.max_steps=4",
        "train.eval_every_steps=2",
        "train.optimiser=adamw",
    )
    upscale(config)
    train(config, None, lambda _: None)
    report = evaluate(config)
    run = RunFolder(config.output_dir)
    curve, markdown, html = (
        (run.evaluation / name).read_text(encoding="utf-8")
        for name in ("learning-curve.svg", "report.md", "report.html")
    )
    assert ">petitions-held-out</text>" in curve
    assert "](learning-curve.svg)" in markdown and 'src="data:image/svg+xml;base64,' in html
    cost, position = (read_json(run.final / f"{name}.json") for name in ("cost", "position"))
    said = read_records(run.metrics)[-1][SAMPLES]["petitions-held-out"]
    for told in (
        f"Measured on {report.date} with the base in float32",
        f"{duration(position['elapsed_s'])} of training: {duration(position['stepping_s'])} of st",
        f"{quantity(cost['peak_memory_bytes'], 'B')} in training",
        f"4 steps, {position['num_tokens']:,} tokens",
        "FLOP of training",
        "the base",
        "after step 2",
        "after step 4",
        said["prompt"].split()[0],
    ):
        assert told in markdown and told in html
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = history_of(read_records(run.metrics), Report.load(run.evaluation))
    assert not without.curve and without.samples
