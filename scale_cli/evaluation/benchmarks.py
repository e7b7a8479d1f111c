"""Figures, intervals, tests and averages from the items of benchmarks.

`benchmark_tasks.py` measures the items. It imports lm-eval, an extra that takes seconds to import, so it is imported
only if a config names benchmarks.

The bootstrap resamples whole items, so the difficulty that heads share cancels in a difference. Outcomes repeat: four
heads, right or wrong, have sixteen distinct rows. To draw n of n items with replacement, counted by distinct row, is
one draw from a multinomial. It is the same bootstrap, and its cost does not grow with the number of items.

Shapes: N items, H heads (in the order of HEADS), C columns, U distinct rows, R resamples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scale_cli.config.schema import EvaluationConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import CorpusError, require
from scale_cli.evaluation.results import (
    HEADS,
    BenchmarkHead,
    BenchmarkResult,
    LanguageAverage,
    Values,
    finite,
)
from scale_cli.report import Interval

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmark_tasks import OpenedBenchmarks

Indices = npt.NDArray[np.int64]
# From counts of distinct rows (..., U) and those rows (U, C) to a figure of each head (..., H).
Statistic = Callable[[Indices, Values], Values]

_VALUES_AT_ONCE = 2**23  # numbers held at once, over all resamples of one batch
_SIGN_FLIPS = 9999


def check_task_file(source: BenchmarkSource) -> None:
    if source.path is not None and not Path(source.path).is_file():
        raise CorpusError(f"{source.name}: no such file: {source.path}")


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
        first, *others = (item.heads["base"].metrics for item in self.items)
        names = [name for name in first if all(name in metrics for metrics in others)]
        return {
            name: np.array(
                [[item.heads[head].metrics[name] for head in HEADS] for item in self.items]
            )
            for name in names
        }

    @property
    def judged_by(self) -> str | None:
        """The first metric with scores from 0 to 1 for all items: `acc` for multiple choice."""
        return next(
            (
                name
                for name, values in self.scores().items()
                if ((values >= 0.0) & (values <= 1.0)).all()
            ),
            None,
        )

    def mean_scores(self) -> dict[str, float | None]:
        """Return every head's mean of the judging metric."""
        assert self.judged_by is not None, "such items are not measured"
        columns = zip(HEADS, self.scores()[self.judged_by].T, strict=True)
        return {head: finite(np.mean(scores_N)) for head, scores_N in columns}


@dataclass(frozen=True)
class _Metric:
    """One metric of every head, on all items and on every resample."""

    value_H: Values
    resampled_RH: Values
    num_items: int

    @classmethod
    def of(
        cls, rows_NC: Values, statistic: Statistic, num_resamples: int, rng: np.random.Generator
    ) -> _Metric:
        """Draw items with replacement, the same for every head."""
        rows_UC, counts_U = np.unique(rows_NC, axis=0, return_counts=True)
        num_items, at_once = len(rows_NC), max(1, _VALUES_AT_ONCE // len(counts_U))
        sizes = [min(at_once, num_resamples - first) for first in range(0, num_resamples, at_once)]
        drawn = [
            statistic(rng.multinomial(num_items, counts_U / num_items, size=size), rows_UC)
            for size in sizes
        ]
        return cls(
            statistic(np.ones(num_items, dtype=np.int64), rows_NC), np.concatenate(drawn), num_items
        )

    def intervals(self) -> dict[str, Interval]:
        """Return every head's value with the middle 95 % of its resamples; one item alone gives no interval."""
        intervals = {}
        for head, value, drawn_R in zip(HEADS, self.value_H, self.resampled_RH.T, strict=True):
            low = high = None
            if self.num_items > 1 and np.isfinite(value) and np.isfinite(drawn_R).all():
                low, high = map(float, np.percentile(drawn_R, [2.5, 97.5]))
            intervals[head] = Interval(finite(value), low, high)
        return intervals

    def differences(self) -> dict[str, Interval]:
        from_base = self.value_H - self.value_H[0], self.resampled_RH - self.resampled_RH[:, :1]
        intervals = _Metric(*from_base, self.num_items).intervals()
        return {head: intervals[head] for head in HEADS[1:]}


def summarise_benchmarks(
    measured: list[BenchmarkItems], *, num_resamples: int, seed: int
) -> tuple[list[BenchmarkResult], list[LanguageAverage]]:
    """Return the figures of every benchmark, p-values adjusted over all of them, and the averages per language."""
    results, judging = [], []
    for index, benchmark in enumerate(measured):
        # Each has its own random numbers, since an average over benchmarks needs independent resamples.
        rng = np.random.default_rng([seed, index])
        metrics = _resample(benchmark, num_resamples, rng)
        results.append(_test(benchmark, metrics, rng))
        judging.append(metrics[results[-1].judged_by])
    p_holm = {head: holm([result.heads[head].p_value for result in results]) for head in HEADS}
    adjusted = [
        replace(
            result,
            heads={
                name: replace(head, p_holm=p_holm[name][index])
                for name, head in result.heads.items()
            },
        )
        for index, result in enumerate(results)
    ]
    averages = [
        _average(
            language,
            [
                metric
                for metric, one in zip(judging, results, strict=True)
                if one.language == language
            ],
        )
        for language in dict.fromkeys(result.language for result in results)
    ]
    return adjusted, averages


def _resample(
    benchmark: BenchmarkItems, num_resamples: int, rng: np.random.Generator
) -> dict[str, _Metric]:
    metrics = {
        name: _Metric.of(scores_NH, means, num_resamples, rng)
        for name, scores_NH in benchmark.scores().items()
    }
    if benchmark.reports_macro_f1:
        classes_NC = np.array(
            [
                [item.gold, *(item.heads[head].prediction for head in HEADS)]
                for item in benchmark.items
            ]
        )
        metrics["macro_f1"] = _Metric.of(classes_NC, macro_f1, num_resamples, rng)
    return metrics


def _test(
    benchmark: BenchmarkItems, metrics: dict[str, _Metric], rng: np.random.Generator
) -> BenchmarkResult:
    judged_by = benchmark.judged_by
    assert judged_by is not None, "a benchmark without one is not measured"
    scores_NH = benchmark.scores()[judged_by]
    right_or_wrong = bool(np.isin(scores_NH, (0.0, 1.0)).all())
    intervals = {name: metric.intervals() for name, metric in metrics.items()}
    differences = {name: metric.differences() for name, metric in metrics.items()}
    heads = {
        "base": BenchmarkHead({name: of_heads["base"] for name, of_heads in intervals.items()}, {})
    }
    for head, after_N in zip(HEADS[1:], scores_NH.T[1:], strict=True):
        heads[head] = BenchmarkHead(
            metrics={name: of_heads[head] for name, of_heads in intervals.items()},
            differences={name: of_heads[head] for name, of_heads in differences.items()},
            gained=int((after_N > scores_NH[:, 0]).sum()) if right_or_wrong else None,
            lost=int((after_N < scores_NH[:, 0]).sum()) if right_or_wrong else None,
            p_value=paired_p(scores_NH[:, 0], after_N, rng),
        )
    source = benchmark.source
    return BenchmarkResult(
        benchmark.name, source.language, source.role, len(benchmark.items), heads, judged_by
    )


def _average(language: str, metrics: list[_Metric]) -> LanguageAverage:
    mean = _Metric(
        np.mean([metric.value_H for metric in metrics], axis=0),
        np.mean([metric.resampled_RH for metric in metrics], axis=0),
        min(metric.num_items for metric in metrics),
    )
    return LanguageAverage(language, len(metrics), mean.intervals(), mean.differences())


def means(counts: Indices, scores_UH: Values) -> Values:
    """Return (..., H), the heads' mean scores; `counts` (..., U) says how often each row occurs."""
    return counts @ scores_UH / counts.sum(axis=-1, keepdims=True)


def macro_f1(counts: Indices, classes_UC: Values) -> Values:
    """Return (..., H), the heads' means over classes of F1 = 2 tp / (2 tp + fp + fn).

    A row holds the right class and every head's class. A class that neither side names does not count.
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

    For items that are right or wrong, this is McNemar's exact test: a fair coin for every item on which the heads
    disagree. For scores in between (truthfulqa_mc2 gives a share of probability), the signs of the differences are
    flipped at random, which is the same test for such scores.
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
    """Return Holm's adjusted p-values: below 5 %, the chance of any false difference among them is at most 5 %.

    None stays None: not tested. Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        adjusted[index] = largest = max(largest, min(1.0, (len(tested) - rank) * p))
    return adjusted
