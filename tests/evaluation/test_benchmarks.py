import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.kobest.utils import macro_f1_score

from scale_cli.commands.evaluate import evaluate
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.evaluation.benchmarks import summarise_benchmarks
from scale_cli.evaluation.intervals import holm, paired_p
from scale_cli.evaluation.render import page, terminal_lines
from scale_cli.evaluation.results import HEADS_AND_RULES, BenchmarkItems, Report
from scale_cli.runs.folder import RunFolder
from tests.evaluation.task_files import add_task, know_only, some_of_blimp, task_of
from tests.evaluation.test_results import ROUTE
from tests.small_runs import petitions_run, train_run


def measured(name: str, accuracies: list[list[float]], language: str = "en") -> BenchmarkItems:
    """Items by their accuracies: one row an item, one column a head."""
    source = BenchmarkSource.model_validate({"name": name, "language": language})
    return BenchmarkItems(source, [{}] * len(accuracies), {"acc": np.array(accuracies)})


def test_the_report_of_a_run_is_what_its_items_give(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_task(tmp_path, "far_away", [], dataset_path="nobody/has-this", dataset_kwargs={})
    blimp = some_of_blimp(shared_data, tmp_path, 2)
    copa = task_of(shared_data, tmp_path, "kobest_copa", limit=12)
    arc = task_of(shared_data, tmp_path, "arc_easy", limit=8)
    asked = {
        "benchmarks": ["far_away", blimp, copa, arc],
        "batch_size": 32,
        "bootstrap_resamples": 200,
    }
    config = petitions_run(shared_data, tmp_path / "run")
    config = train_run(RunConfig.model_validate(config.model_dump() | {"evaluation": asked}))
    know_only(tmp_path, monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr("scale_cli.commands.evaluate.log", lines.append)
    report = evaluate(config, trust_tasks=True)
    told = {result.name: result.num_items for result in report.benchmarks}
    assert told == {"blimp": 134, "kobest_copa": 12, "arc_easy": 8}
    (line,) = [line for line in lines if "far_away" in line]
    assert line.startswith("skipped far_away: ") and "nobody/has-this" in line, (
        "one line, and the others are measured"
    )
    for result in report.benchmarks:
        file = RunFolder(config.output_dir).evaluation / "items" / f"{result.name}.jsonl"
        items = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for head in HEADS_AND_RULES:
            metrics = {
                name: interval.value for name, interval in result.heads[head].metrics.items()
            }
            pairs = [(item["target"], item["heads"][head]["prediction"]) for item in items]
            expected = {"acc": np.mean([gold == said for gold, said in pairs])}
            if "acc_norm" in metrics:
                expected["acc_norm"] = np.mean(
                    [item["heads"][head]["metrics"]["acc_norm"] for item in items]
                )
            if result.name == "kobest_copa":
                expected["f1"] = macro_f1_score(pairs)
            assert metrics == pytest.approx(expected)
            said = [np.argmax(item["heads"][head]["log_likelihoods"]) for item in items]
            assert said == [prediction for _, prediction in pairs]
    assert Report.load(RunFolder(config.output_dir).evaluation) == report
    page = (RunFolder(config.output_dir).evaluation / "report.md").read_text(encoding="utf-8")
    assert (
        "## Benchmarks: Korean" in page
        and "- far_away: " in page
        and "| kobest_copa | 12 | accuracy |" in page
    )


def test_holm_runs_over_the_benchmarks_of_one_head() -> None:
    better = measured("a", [[0.0, 1.0, 0.0, 0.0]] * 10)
    alike = measured("b", [[1.0, 1.0, 1.0, 0.0]] * 10)
    (first, second), _ = summarise_benchmarks([better, alike], num_resamples=100, seed=0)
    trained = first.heads["trained"]
    assert trained.p_value == pytest.approx(2 / 1024)
    assert trained.p_holm == pytest.approx(4 / 1024)
    assert (trained.gained, trained.lost) == (10, 0)
    assert second.heads["trained"].p_holm == 1.0
    assert first.heads["base"].p_value is None and first.heads["base"].differences == {}


def test_averages_weigh_benchmarks_alike_with_intervals_over_the_items_of_each() -> None:
    right = [1.0] * 4
    wrong = [0.0, 1.0, 0.0, 0.0]
    large = [right, wrong] * 50
    small = [right, wrong, wrong, wrong] * 5
    _, (english, korean) = summarise_benchmarks(
        [measured("a", large), measured("b", small), measured("c", small, "ko")],
        num_resamples=2000,
        seed=0,
    )
    assert (english.language, english.num_benchmarks) == ("en", 2)
    assert english.acc["base"].value == pytest.approx((0.5 + 0.25) / 2)
    difference = english.acc_difference["trained"]
    assert difference.value == pytest.approx((0.5 + 0.75) / 2)
    assert difference.low is not None and difference.high is not None
    standard_error = 0.5 * math.sqrt(0.25 / 100 + 0.1875 / 20)
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * standard_error, rel=0.12)
    assert korean.acc["base"].value == pytest.approx(0.25)


@given(st.integers(0, 40), st.integers(0, 40))
def test_right_and_wrong_answers_are_tested_by_a_fair_coin_counted_out(
    gained: int, lost: int
) -> None:
    num_tosses = gained + lost
    at_most = sum(math.comb(num_tosses, heads) for heads in range(min(gained, lost) + 1))
    expected = min(Fraction(1), Fraction(2 * at_most, 2**num_tosses))
    before, after = np.array(
        [[0, 1]] * gained + [[1, 0]] * lost + [[1, 1], [0, 0]], dtype=np.float64
    ).T
    assert paired_p(before, after, np.random.default_rng(0)) == pytest.approx(float(expected))
    assert paired_p(after, before, np.random.default_rng(0)) == pytest.approx(float(expected))


def test_scores_in_between_are_tested_by_flipping_signs() -> None:
    rng = np.random.default_rng(6)
    before = rng.random(10)
    after = before + rng.normal(0.05, 0.1, 10)
    difference = after - before
    signs = np.array(np.meshgrid(*[[-1, 1]] * 10)).reshape(10, -1)
    flipped = difference @ signs / 10
    expected = float((np.abs(flipped) >= abs(difference.mean()) - 1e-12).mean())
    assert paired_p(before, after, rng) == pytest.approx(expected, abs=0.01)
    assert paired_p(before, np.full(10, math.nan), rng) is None


@given(st.lists(st.floats(0.0, 1.0), max_size=8))
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    adjusted = holm([*p_values, None])
    assert adjusted.pop() is None
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        remaining = sorted(range(len(p_values)), key=lambda index: p_values[index])
        while remaining and p_values[remaining[0]] * len(remaining) <= level:
            rejected.add(remaining.pop(0))
        assert {
            index for index, p in enumerate(adjusted) if p is not None and p <= level
        } == rejected


def test_no_difference_shown_is_said_where_that_is_the_truth() -> None:
    better = measured("better", [[0.0, 1.0, 1.0, 0.0]] * 20)
    alike = measured("alike", [[1.0] * 4, [0.0] * 4] * 10)
    results, averages = summarise_benchmarks([better, alike], num_resamples=300, seed=0)
    report = Report("route", "posterior", 3, 384, "0" * 64, [], results, averages)
    said = {line.split()[0]: line for line in terminal_lines(report) if "accuracy" in line}
    assert said["better"].endswith("+1.0000 [+1.0000, +1.0000]  p < 0.001")
    assert said["alike"].endswith("no difference shown")
    assert "no difference shown |" in page(report, ROUTE, "md")
