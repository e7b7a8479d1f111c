from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.tasks.kobest.utils import macro_f1_score
from sklearn.metrics import f1_score  # type: ignore[import-untyped]

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.evaluation.benchmarks import (
    BenchmarkItems,
    Item,
    ItemOutcome,
    holm,
    macro_f1,
    paired_p,
    summarise_benchmarks,
)
from scale_cli.evaluation.render import markdown, terminal_lines
from scale_cli.evaluation.results import HEADS, BenchmarkResult, Report
from scale_cli.storage.records import RunFolder
from tests.evaluation.task_files import add_task, know_only, some_of_blimp, task_of
from tests.export.conftest import configured


def answered(right: list[list[float]], gold: list[int] | None = None, norm: bool = False) -> list[Item]:
    """Items of two choices; `right` has one row an item and one column a head."""
    gold = gold or [0] * len(right)
    items = []
    for doc_id, (row, label) in enumerate(zip(right, gold, strict=True)):
        heads = {}
        for head, score in zip(HEADS, row, strict=True):
            metrics = {"acc": score} | ({"acc_norm": score} if norm else {})
            heads[head] = ItemOutcome([-1.0, -math.inf], label if score == 1.0 else 1 - label, metrics)
        items.append(Item("only", doc_id, label, heads))
    return items


def measured(name: str, items: list[Item], language: str = "en", macro_f1: bool = False) -> BenchmarkItems:
    source = BenchmarkSource.model_validate({"name": name, "language": language})
    return BenchmarkItems(source, name, items, macro_f1)


def summarised(*benchmarks: BenchmarkItems) -> list[BenchmarkResult]:
    return summarise_benchmarks(list(benchmarks), num_resamples=100, seed=0)[0]


@pytest.fixture(scope="module")
def evaluated(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Report, list[str]]:
    """A run that is evaluated on every kind of benchmark, one of which is not there."""
    folder = tmp_path_factory.mktemp("benchmarks")
    add_task(folder, "far_away", [], dataset_path="nobody/has-this", dataset_kwargs={})
    blimp = some_of_blimp(shared_data, folder, 2)
    copa = task_of(shared_data, folder, "kobest_copa", limit=12)
    arc = task_of(shared_data, folder, "arc_easy", limit=8)
    asked = {"benchmarks": ["far_away", blimp, copa, arc], "batch_size": 32, "bootstrap_resamples": 200}
    config = configured(shared_data, folder / "run", {"variant": "route"})
    config = RunConfig.model_validate(config.model_dump() | {"evaluation": asked})
    upscale(config)
    train(config, None, print)
    with pytest.MonkeyPatch.context() as patch:
        know_only(folder, patch)
        lines: list[str] = []
        report = evaluate(config, lines.append)
    return config, report, lines


Evaluated = tuple[RunConfig, Report, list[str]]


def test_a_missing_task_is_one_line_and_the_others_are_measured(evaluated: Evaluated) -> None:
    _, report, lines = evaluated
    assert [result.name for result in report.benchmarks] == ["blimp", "kobest_copa", "arc_easy"]
    assert [result.num_items for result in report.benchmarks] == [134, 12, 8]
    (line,) = [line for line in lines if "far_away" in line]
    assert line.startswith("skipped far_away: ") and "nobody/has-this" in line
    assert [skipped.name for skipped in report.skipped_benchmarks] == ["far_away"]


def test_every_item_is_kept_and_gives_the_reports_figures(evaluated: Evaluated) -> None:
    config, report, _ = evaluated
    for result in report.benchmarks:
        file = RunFolder(config.output_dir).evaluation / "items" / f"{result.name}.jsonl"
        items = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert len(items) == result.num_items
        for head in HEADS:
            for metric in {"acc", "acc_norm"} & result.heads[head].metrics.keys():
                mean = np.mean([item["heads"][head]["metrics"][metric] for item in items])
                assert result.heads[head].metrics[metric].value == pytest.approx(mean)
            said = [np.argmax(item["heads"][head]["log_likelihoods"]) == item["gold"] for item in items]
            assert result.heads[head].metrics["acc"].value == pytest.approx(np.mean(said))
            if "macro_f1" in result.heads[head].metrics:
                pairs = [(item["gold"], item["heads"][head]["prediction"]) for item in items]
                assert result.heads[head].metrics["macro_f1"].value == pytest.approx(macro_f1_score(pairs))
    assert "macro_f1" in report.benchmarks[1].heads["base"].metrics


def test_the_written_report_reads_back(evaluated: Evaluated) -> None:
    config, report, _ = evaluated
    written = json.loads((RunFolder(config.output_dir).evaluation / "report.json").read_text(encoding="utf-8"))
    assert Report.from_json(written) == report
    page = (RunFolder(config.output_dir).evaluation / "report.md").read_text(encoding="utf-8")
    assert "## Benchmarks: Korean" in page and "- far_away: " in page and "| kobest_copa | 12 | accuracy |" in page


def test_holm_runs_over_the_benchmarks_of_one_head() -> None:
    alike, better = [[1.0, 1.0, 1.0, 0.0]] * 10, [[0.0, 1.0, 0.0, 0.0]] * 10
    first, second = summarised(measured("a", answered(better)), measured("b", answered(alike)))
    assert first.heads["adapted"].p_value == pytest.approx(2 / 1024)
    assert first.heads["adapted"].p_holm == pytest.approx(4 / 1024)
    assert second.heads["adapted"].p_holm == 1.0
    assert (first.heads["adapted"].gained, first.heads["adapted"].lost) == (10, 0)
    assert (second.heads["cosine"].gained, second.heads["cosine"].lost) == (0, 10)
    assert first.heads["base"].p_value is None and first.heads["base"].differences == {}


def test_averages_weigh_benchmarks_alike_and_their_intervals_hold_the_items_of_each_together() -> None:
    right, wrong = [1.0] * 4, [0.0, 1.0, 0.0, 0.0]
    large, small = answered([right, wrong] * 50), answered([right, wrong, wrong, wrong] * 5)
    _, (english, korean) = summarise_benchmarks(
        [measured("a", large), measured("b", small), measured("c", small, "ko")], num_resamples=2000, seed=0
    )
    assert (english.language, english.num_benchmarks) == ("en", 2)
    assert english.acc["base"].value == pytest.approx((0.5 + 0.25) / 2)
    difference = english.acc_difference["adapted"]
    assert difference.value == pytest.approx((0.5 + 0.75) / 2)
    assert difference.low is not None and difference.high is not None
    standard_error = 0.5 * math.sqrt(0.25 / 100 + 0.1875 / 20)
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * standard_error, rel=0.12)
    assert korean.acc["base"].value == pytest.approx(0.25)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_macro_f1_is_sklearns_however_the_items_are_counted(pairs: list[tuple[int, int]]) -> None:
    expected = f1_score(*np.array(pairs).T, average="macro", zero_division=0.0)
    assert macro_f1(np.ones(len(pairs), dtype=np.int64), np.array(pairs)) == pytest.approx(expected)
    rows, counts = np.unique(pairs, axis=0, return_counts=True)
    assert macro_f1(counts, rows) == pytest.approx(expected)


@given(st.integers(0, 40), st.integers(0, 40))
def test_right_and_wrong_answers_are_tested_by_a_fair_coin_counted_out(gained: int, lost: int) -> None:
    num_tosses = gained + lost
    at_most = sum(math.comb(num_tosses, heads) for heads in range(min(gained, lost) + 1))
    expected = min(Fraction(1), Fraction(2 * at_most, 2**num_tosses))
    before, after = np.array([[0, 1]] * gained + [[1, 0]] * lost + [[1, 1], [0, 0]], dtype=np.float64).T
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
        rejected, remaining = set(), sorted(range(len(p_values)), key=lambda index: p_values[index])
        while remaining and p_values[remaining[0]] * len(remaining) <= level:
            rejected.add(remaining.pop(0))
        assert {index for index, p in enumerate(adjusted) if p is not None and p <= level} == rejected


def test_a_log_likelihood_of_minus_infinity_is_null_in_the_items() -> None:
    (item,) = answered([[1.0] * 4])
    assert json.loads(item.to_json_line())["heads"]["base"]["log_likelihoods"] == [-1.0, None]


def test_no_difference_shown_is_said_where_that_is_the_truth() -> None:
    better, alike = [[0.0, 1.0, 1.0, 0.0]] * 20, [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]] * 10
    results, averages = summarise_benchmarks(
        [measured("better", answered(better)), measured("alike", answered(alike))], num_resamples=300, seed=0
    )
    report = Report("route", "posterior", 3, 384, "0" * 64, [], results, averages)
    said = {line.split()[0]: line for line in terminal_lines(report) if "accuracy" in line}
    assert said["better"].endswith("+1.0000 [+1.0000, +1.0000]  p < 0.001")
    assert said["alike"].endswith("no difference shown")
    assert "no difference shown |" in markdown(report, MethodConfig(variant="route"))
