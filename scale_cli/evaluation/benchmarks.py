"""Figures, intervals, tests and averages from the items of benchmarks.

`benchmark_tasks.py` measures the items. It imports lm-eval, an extra that takes seconds to import,
so it is imported only if a config names benchmarks.

The bootstrap resamples whole items, so the difficulty that heads share cancels in a difference.
Outcomes repeat: four heads, right or wrong, have sixteen distinct rows. To draw n of n items with
replacement, counted by distinct row, is one draw from a multinomial. It is the same bootstrap, and
its cost does not grow with the number of items.

Shapes: N items, H heads (in the order of HEADS), C columns, U distinct rows, R resamples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scale_cli.config.schema import EvaluationConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import require
from scale_cli.evaluation.results import (
    HEADS,
    BenchmarkHead,
    BenchmarkResult,
    LanguageAverage,
    Values,
    finite,
    resampled_interval,
)
from scale_cli.report import Interval

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmark_tasks import OpenedBenchmarks

Indices = npt.NDArray[np.int64]
# From counts of distinct rows (..., U) and those rows (U, C) to a figure of each head (..., H).
Statistic = Callable[[Indices, Values], Values]

_VALUES_AT_ONCE = 2**23  # numbers held at once, over all resamples of one batch
_SIGN_FLIPS = 9999


def open_benchmarks_of(evaluation: EvaluationConfig) -> OpenedBenchmarks | None:
    """Open every benchmark that a config names; None if it names none."""
    if not evaluation.benchmarks:
        return None
    require("lm_eval", "evaluation.benchmarks")
    from scale_cli.evaluation.benchmark_tasks import open_benchmarks

    return open_benchmarks(evaluation.benchmarks)


@dataclass(frozen=True)
class ItemOutcome:
    """The outcome of one head on one item."""

    log_likelihoods: list[float]  # of every choice, nats; empty if the answer is generated
    prediction: int | str  # the most likely choice, or what was generated
    metrics: dict[str, float]  # lm-eval's own, of this item: `acc`, ...


@dataclass(frozen=True)
class Item:
    """One item under every head."""

    subtask: str  # its task, if the benchmark is a group
    doc_id: int
    gold: int | list[int] | str
    heads: dict[str, ItemOutcome]

    def to_json_line(self) -> str:
        """Return the item as a line of JSON; a figure that is not finite is null."""
        value = asdict(self)
        for outcome in value["heads"].values():
            outcome["log_likelihoods"] = [finite(said) for said in outcome["log_likelihoods"]]
            outcome["metrics"] = {name: finite(score) for name, score in outcome["metrics"].items()}
        return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class BenchmarkItems:
    """All items of one benchmark."""

    source: BenchmarkSource  # its entry in the config
    name: str  # in the report: a task of a group may be a benchmark by itself
    items: list[Item]
    reports_macro_f1: bool  # whether lm-eval reports macro-F1 for it

    def scores(self) -> dict[str, Values]:
        """Return (N, H) scores by every metric that all items have."""
        of_base = [item.heads["base"].metrics for item in self.items]
        return {
            name: np.array(
                [[item.heads[head].metrics[name] for head in HEADS] for item in self.items]
            )
            for name in of_base[0]
            if all(name in metrics for metrics in of_base)
        }

    @property
    def judged_by(self) -> str | None:
        """The first metric with scores from 0 to 1 for all items: `acc` for multiple choice."""
        for name, scores_NH in self.scores().items():
            if ((scores_NH >= 0.0) & (scores_NH <= 1.0)).all():
                return name
        return None

    def mean_scores(self) -> dict[str, float | None]:
        """Return every head's mean of the judging metric."""
        assert self.judged_by is not None, "such items are not measured"
        means_H = self.scores()[self.judged_by].mean(axis=0)
        return {head: finite(mean) for head, mean in zip(HEADS, means_H, strict=True)}


@dataclass(frozen=True)
class _Metric:
    """One metric of every head, on all items and on every resample."""

    value_H: Values
    resampled_RH: Values
    num_items: int

    def intervals(self) -> dict[str, Interval]:
        columns = zip(HEADS, self.value_H, self.resampled_RH.T, strict=True)
        return {
            head: resampled_interval(value, drawn_R, self.num_items)
            for head, value, drawn_R in columns
        }

    def differences(self) -> dict[str, Interval]:
        """Return the intervals of every other head's difference from the base's head."""
        value_H = self.value_H - self.value_H[0]
        resampled_RH = self.resampled_RH - self.resampled_RH[:, :1]
        intervals = _Metric(value_H, resampled_RH, self.num_items).intervals()
        return {head: intervals[head] for head in HEADS[1:]}


def summarise_benchmarks(
    measured: list[BenchmarkItems], *, num_resamples: int, seed: int
) -> tuple[list[BenchmarkResult], list[LanguageAverage]]:
    """Return every benchmark's figures, p-values adjusted over all, and averages per language."""
    results: list[BenchmarkResult] = []
    judging: dict[str, list[_Metric]] = {}  # of every benchmark, by language
    for index, benchmark in enumerate(measured):
        # An average over benchmarks needs independent resamples of each.
        rng = np.random.default_rng([seed, index])
        metrics = {
            name: _resample(scores_NH, means, num_resamples, rng)
            for name, scores_NH in benchmark.scores().items()
        }
        if benchmark.reports_macro_f1:
            classes = [
                [item.gold, *(item.heads[head].prediction for head in HEADS)]
                for item in benchmark.items
            ]
            metrics["macro_f1"] = _resample(np.array(classes), macro_f1, num_resamples, rng)
        result = _test(benchmark, metrics, rng)
        results.append(result)
        judging.setdefault(result.language, []).append(metrics[result.judged_by])

    for head in HEADS[1:]:
        p_values = [result.heads[head].p_value for result in results]
        for result, p_holm in zip(results, holm(p_values), strict=True):
            result.heads[head] = replace(result.heads[head], p_holm=p_holm)

    averages = []
    for language, of_language in judging.items():
        mean = _Metric(
            np.mean([metric.value_H for metric in of_language], axis=0),
            np.mean([metric.resampled_RH for metric in of_language], axis=0),
            min(metric.num_items for metric in of_language),
        )
        averages.append(
            LanguageAverage(language, len(of_language), mean.intervals(), mean.differences())
        )
    return results, averages


def _resample(
    rows_NC: Values, statistic: Statistic, num_resamples: int, rng: np.random.Generator
) -> _Metric:
    """Draw items with replacement, the same for every head."""
    rows_UC, counts_U = np.unique(rows_NC, axis=0, return_counts=True)
    num_items = len(rows_NC)
    at_once = max(1, _VALUES_AT_ONCE // len(counts_U))
    resampled = []
    for first in range(0, num_resamples, at_once):
        size = min(at_once, num_resamples - first)
        drawn_RU = rng.multinomial(num_items, counts_U / num_items, size=size)
        resampled.append(statistic(drawn_RU, rows_UC))
    return _Metric(statistic(counts_U, rows_UC), np.concatenate(resampled), num_items)


def _test(
    benchmark: BenchmarkItems, metrics: dict[str, _Metric], rng: np.random.Generator
) -> BenchmarkResult:
    """Return the figures of every head, and the test of each head beside the base's."""
    assert benchmark.judged_by is not None, "a benchmark without one is not measured"
    scores_NH = benchmark.scores()[benchmark.judged_by]
    right_or_wrong = bool(np.isin(scores_NH, (0.0, 1.0)).all())
    intervals = {name: metric.intervals() for name, metric in metrics.items()}
    differences = {name: metric.differences() for name, metric in metrics.items()}

    heads = {}
    base_N = scores_NH[:, 0]
    for head, scores_N in zip(HEADS, scores_NH.T, strict=True):
        figures = {name: of_heads[head] for name, of_heads in intervals.items()}
        if head == "base":
            heads[head] = BenchmarkHead(figures, {})
            continue
        heads[head] = BenchmarkHead(
            metrics=figures,
            differences={name: of_heads[head] for name, of_heads in differences.items()},
            gained=int((scores_N > base_N).sum()) if right_or_wrong else None,
            lost=int((scores_N < base_N).sum()) if right_or_wrong else None,
            p_value=paired_p(base_N, scores_N, rng),
        )
    return BenchmarkResult(
        name=benchmark.name,
        language=benchmark.source.language,
        role=benchmark.source.role,
        num_items=len(benchmark.items),
        heads=heads,
        judged_by=benchmark.judged_by,
    )


def means(counts: Indices, scores_UH: Values) -> Values:
    """Return (..., H), the heads' mean scores; `counts` (..., U) says how often each row occurs."""
    return counts @ scores_UH / counts.sum(axis=-1, keepdims=True)


def macro_f1(counts: Indices, classes_UC: Values) -> Values:
    """Return (..., H), the heads' means over classes of F1 = 2 tp / (2 tp + fp + fn).

    A row holds the right class and every head's class. A class that neither side names does not
    count.
    """
    gold_U1, said_UH = classes_UC[:, :1], classes_UC[:, 1:]
    total, num_classes = np.zeros(()), np.zeros(())
    for label in np.unique(classes_UC):
        is_gold, is_said = gold_U1 == label, said_UH == label
        named = counts @ is_gold + counts @ is_said
        total = total + 2.0 * (counts @ (is_gold & is_said)) / np.maximum(named, 1)
        num_classes = num_classes + (named > 0)
    return total / num_classes


def paired_p(before_N: Values, after_N: Values, rng: np.random.Generator) -> float | None:
    """Return the p-value of a paired difference of scores; None if one is not finite.

    For items that are right or wrong, this is McNemar's exact test: a fair coin for every item on
    which the heads disagree. For scores in between (truthfulqa_mc2 gives a share of probability),
    the signs of the differences are flipped at random, which is the same test for such scores.
    """
    from scipy import stats

    difference_N = after_N - before_N
    if not np.isfinite(difference_N).all():
        return None
    if np.isin(difference_N, (-1.0, 0.0, 1.0)).all():
        gained, differing = int((difference_N > 0).sum()), int((difference_N != 0).sum())
        return float(stats.binomtest(gained, differing, 0.5).pvalue) if differing else 1.0
    tested = stats.permutation_test(
        (difference_N,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_SIGN_FLIPS,
        batch=max(1, _VALUES_AT_ONCE // len(difference_N)),
        rng=rng,
    )
    return float(tested.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values; None stays None: not tested.

    Below 5 %, the chance of any false difference among them is at most 5 %. Source: Holm 1979, "A
    simple sequentially rejective multiple test procedure".
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        adjusted[index] = largest = max(largest, min(1.0, (len(tested) - rank) * p))
    return adjusted
