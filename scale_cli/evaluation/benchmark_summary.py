"""From the items of benchmarks to figures, intervals, tests and averages.

Shapes: N items, H heads (in the order of HEADS), R resamples.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from scale_cli.config.sources import BenchmarkSource
from scale_cli.evaluation.results import (
    HEADS,
    BenchmarkHead,
    BenchmarkResult,
    LanguageAverage,
    SkippedBenchmark,
)
from scale_cli.evaluation.statistics import (
    Values,
    finite,
    holm,
    macro_f1,
    paired_p,
    percentile_interval,
    resampled_macro_f1,
    resampled_means,
)
from scale_cli.report.numbers import Interval


@dataclass(frozen=True)
class ItemOutcome:
    """What one head made of one item."""

    log_likelihoods: list[float]  # of every choice, nats; none where the answer is generated
    prediction: int | str  # the most likely choice, or what was generated
    # lm-eval's own, of this item: `acc`, and `acc_norm` where the task reports it; of a generative task its own
    metrics: dict[str, float]


@dataclass(frozen=True)
class Item:
    """One item under every head; `subtask` is the task of a group that it is of."""

    subtask: str
    doc_id: int
    gold: int | list[int] | str
    heads: dict[str, ItemOutcome]

    def to_json_line(self) -> str:
        """Return it as a line of JSON, in which a log-likelihood of minus infinity is null."""
        value = asdict(self)
        for outcome in value["heads"].values():
            outcome["log_likelihoods"] = [finite(said) for said in outcome["log_likelihoods"]]
            outcome["metrics"] = {name: finite(score) for name, score in outcome["metrics"].items()}
        return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class BenchmarkItems:
    """All items of one benchmark."""

    name: str  # of the benchmark
    source: BenchmarkSource  # the config's item that it comes from
    items: list[Item]  # under every head
    reports_macro_f1: bool  # whether lm-eval reports macro-F1 of it

    @property
    def metrics(self) -> list[str]:
        """The metrics that every item has."""
        return metrics_of(self.items)

    @property
    def judged_by(self) -> str:
        """The metric that is tested and averaged."""
        metric = judging_metric(self.items)
        assert metric is not None, "a benchmark without one is not measured"
        return metric

    def scores(self, metric: str) -> Values:
        """Return (N, H) per-item scores."""
        return np.array([[item.heads[head].metrics[metric] for head in HEADS] for item in self.items])


def metrics_of(items: list[Item]) -> list[str]:
    """Return the metrics that all of some items have."""
    names = items[0].heads["base"].metrics
    return [name for name in names if all(name in item.heads["base"].metrics for item in items)]


def judging_metric(items: list[Item]) -> str | None:
    """Return the first metric by which every item is right, wrong or in between: `acc` of multiple choice."""
    return next(
        (
            name
            for name in metrics_of(items)
            if all(0.0 <= outcome.metrics[name] <= 1.0 for item in items for outcome in item.heads.values())
        ),
        None,
    )


@dataclass(frozen=True)
class MeasuredBenchmarks:
    """What the benchmarks of a report came to."""

    results: list[BenchmarkResult]  # figures, in the config's order
    averages: list[LanguageAverage]  # per language
    skipped: list[SkippedBenchmark]  # what could not be measured, and why
    items: dict[str, list[Item]]  # by benchmark


@dataclass(frozen=True)
class _Figure:
    """One metric of every head, and the same of every resample."""

    value_H: Values
    resampled_RH: Values
    num_items: int

    def interval(self, head: int) -> Interval:
        return percentile_interval(self.value_H[head], self.resampled_RH[:, head], self.num_items)

    def difference(self, head: int) -> Interval:
        resampled_R = self.resampled_RH[:, head] - self.resampled_RH[:, 0]
        return percentile_interval(self.value_H[head] - self.value_H[0], resampled_R, self.num_items)


def summarise_benchmarks(
    measured: list[BenchmarkItems], *, num_resamples: int, seed: int
) -> tuple[list[BenchmarkResult], list[LanguageAverage]]:
    """Return the figures of every benchmark, p-values adjusted over all of them, and the averages per language."""
    results, figures = [], []
    for index, benchmark in enumerate(measured):
        # Each has random numbers of its own: an average over benchmarks needs independent resamples.
        rng = np.random.default_rng([seed, index])
        by_metric = _figures(benchmark, num_resamples, rng)
        results.append(_result(benchmark, by_metric, rng))
        figures.append(by_metric[benchmark.judged_by])
    averages = [
        _average(
            language, [figure for figure, result in zip(figures, results, strict=True) if result.language == language]
        )
        for language in dict.fromkeys(result.language for result in results)
    ]
    return _adjusted(results), averages


def _figures(benchmark: BenchmarkItems, num_resamples: int, rng: np.random.Generator) -> dict[str, _Figure]:
    num_items, figures = len(benchmark.items), {}
    for metric in benchmark.metrics:
        scores_NH = benchmark.scores(metric)
        resampled_RH = resampled_means(scores_NH, num_resamples, rng)
        figures[metric] = _Figure(scores_NH.mean(axis=0), resampled_RH, num_items)
    if benchmark.reports_macro_f1:
        gold_N = np.array([item.gold for item in benchmark.items])
        predicted_NH = np.array([[item.heads[head].prediction for head in HEADS] for item in benchmark.items])
        once_N = np.ones(num_items, dtype=np.int64)
        value_H = np.array([macro_f1(once_N, gold_N, predicted_N) for predicted_N in predicted_NH.T])
        resampled_RH = resampled_macro_f1(gold_N, predicted_NH, num_resamples, rng)
        figures["macro_f1"] = _Figure(value_H, resampled_RH, num_items)
    return figures


def _result(benchmark: BenchmarkItems, figures: dict[str, _Figure], rng: np.random.Generator) -> BenchmarkResult:
    acc_NH = benchmark.scores(benchmark.judged_by)
    right_or_wrong = bool(np.isin(acc_NH, (0.0, 1.0)).all())
    heads = {}
    for column, head in enumerate(HEADS):
        metrics = {name: figure.interval(column) for name, figure in figures.items()}
        if head == "base":
            heads[head] = BenchmarkHead(metrics, {})
            continue
        difference_N = acc_NH[:, column] - acc_NH[:, 0]
        heads[head] = BenchmarkHead(
            metrics,
            {name: figure.difference(column) for name, figure in figures.items()},
            gained=int((difference_N > 0).sum()) if right_or_wrong else None,
            lost=int((difference_N < 0).sum()) if right_or_wrong else None,
            p_value=paired_p(acc_NH[:, 0], acc_NH[:, column], rng),
        )
    source = benchmark.source
    return BenchmarkResult(
        benchmark.name,
        source.language,
        source.role,
        len(benchmark.items),
        heads,
        benchmark.judged_by,
    )


def _adjusted(results: list[BenchmarkResult]) -> list[BenchmarkResult]:
    """Return the results with Holm's correction of each head's p-values over all benchmarks."""
    adjusted: list[dict[str, BenchmarkHead]] = [dict(result.heads) for result in results]
    for head in HEADS:
        tested = [index for index, heads in enumerate(adjusted) if heads[head].p_value is not None]
        p_values = holm([p for index in tested if (p := adjusted[index][head].p_value) is not None])
        for index, p_holm in zip(tested, p_values, strict=True):
            adjusted[index][head] = replace(adjusted[index][head], p_holm=p_holm)
    return [replace(result, heads=heads) for result, heads in zip(results, adjusted, strict=True)]


def _average(language: str, figures: list[_Figure]) -> LanguageAverage:
    value_H = np.mean([figure.value_H for figure in figures], axis=0)
    resampled_RH = np.mean([figure.resampled_RH for figure in figures], axis=0)
    mean = _Figure(value_H, resampled_RH, min(figure.num_items for figure in figures))
    return LanguageAverage(
        language,
        len(figures),
        {head: mean.interval(column) for column, head in enumerate(HEADS)},
        {head: mean.difference(column) for column, head in enumerate(HEADS) if head != "base"},
    )
