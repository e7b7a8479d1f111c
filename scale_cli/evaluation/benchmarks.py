"""The benchmarks of a config, and figures, intervals, tests and averages from their items.

lm-eval, which answers and marks the items, is an extra that takes seconds to import. So it is
imported only if a config names benchmarks.

Shapes: N items, H heads (in the order of HEADS_AND_RULES), M metrics, R resamples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scale_cli.config.schema import EvaluationConfig
from scale_cli.errors import require
from scale_cli.evaluation.intervals import Values, bootstrap, holm, intervals_of, paired_p
from scale_cli.evaluation.results import (
    HEADS_AND_RULES,
    BenchmarkHead,
    BenchmarkItems,
    BenchmarkResult,
    LanguageAverage,
)
from scale_cli.report import Interval

if TYPE_CHECKING:
    from scale_cli.evaluation.lm_eval_heads import OpenedBenchmarks


class _Drawn(NamedTuple):
    """A metric of every head."""

    value_H: Values
    drawn_RH: Values  # of each resample of the items
    num_items: int


def open_benchmarks_of(
    evaluation: EvaluationConfig, *, trust_tasks: bool
) -> OpenedBenchmarks | None:
    """Open every benchmark that a config names; None if it names none."""
    if not evaluation.benchmarks:
        return None
    for module in ("lm_eval", "scipy"):
        require(module, "evaluation.benchmarks")
    from scale_cli.evaluation.lm_eval_heads import open_benchmarks

    return open_benchmarks(evaluation.benchmarks, trust_tasks=trust_tasks)


def summarise_benchmarks(
    measured: list[BenchmarkItems], *, num_resamples: int, seed: int
) -> tuple[list[BenchmarkResult], list[LanguageAverage]]:
    """Return every benchmark's figures, p-values adjusted over all, and averages per language."""
    results: list[BenchmarkResult] = []
    judging: dict[str, list[_Drawn]] = {}  # of every benchmark, by language
    for index, benchmark in enumerate(measured):
        # An average over benchmarks needs independent resamples of each.
        rng = np.random.default_rng([seed, index])
        drawn = _draw(benchmark, num_resamples, rng)
        tests = _tests(benchmark.scores[benchmark.judged_by], rng)
        results.append(_result_of(benchmark, drawn, tests))
        judging.setdefault(benchmark.source.language, []).append(drawn[benchmark.judged_by])

    for head in HEADS_AND_RULES[1:]:
        p_values = [result.heads[head].p_value for result in results]
        for result, p_holm in zip(results, holm(p_values), strict=True):
            result.heads[head] = replace(result.heads[head], p_holm=p_holm)

    averages = []
    for language, of_language in judging.items():
        figures = _by_head(
            np.mean([drawn.value_H for drawn in of_language], axis=0),
            np.mean([drawn.drawn_RH for drawn in of_language], axis=0),
            min(drawn.num_items for drawn in of_language),
        )
        averages.append(LanguageAverage(language, len(of_language), *figures))
    return results, averages


def _draw(
    benchmark: BenchmarkItems, num_resamples: int, rng: np.random.Generator
) -> dict[str, _Drawn]:
    """Return every metric of a benchmark, and of resamples of its items."""
    num_items = len(benchmark.items)
    scores_MNH = np.stack(list(benchmark.scores.values()))
    value_MH = scores_MNH.mean(axis=1)
    drawn_RMH = bootstrap(
        partial(_means, scores_MNH), num_items, num_resamples=num_resamples, rng=rng
    )
    drawn = {}
    for at, name in enumerate(benchmark.scores):
        drawn[name] = _Drawn(value_MH[at], drawn_RMH[:, at], num_items)
    if benchmark.f1 is not None:  # no mean of items, so it gets no interval
        drawn["f1"] = _Drawn(benchmark.f1, benchmark.f1[None], 1)
    return drawn


def _result_of(
    benchmark: BenchmarkItems, drawn: dict[str, _Drawn], tests: dict[str, dict[str, Any]]
) -> BenchmarkResult:
    """Return the figures of one benchmark, by head."""
    by_metric = {name: _by_head(*of_metric) for name, of_metric in drawn.items()}
    heads = {}
    for head in HEADS_AND_RULES:
        metrics = {name: values[head] for name, (values, _) in by_metric.items()}
        differences = {}
        if head != "base":
            differences = {name: changes[head] for name, (_, changes) in by_metric.items()}
        heads[head] = BenchmarkHead(metrics, differences, **tests.get(head, {}))
    return BenchmarkResult(
        name=benchmark.source.name,
        language=benchmark.source.language,
        role=benchmark.source.role,
        num_items=len(benchmark.items),
        heads=heads,
        judged_by=benchmark.judged_by,
    )


def _means(scores_MNH: Values, counts_RN: Values) -> Values:
    """Return (R, M, H), the means over items that are counted as often as a resample drew them."""
    sums_MRH = counts_RN @ scores_MNH
    return (sums_MRH / counts_RN.sum(axis=1, keepdims=True)).transpose(1, 0, 2)


def _tests(scores_NH: Values, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return the test of each head's scores beside the base's, and the items gained and lost."""
    right_or_wrong = bool(np.isin(scores_NH, (0.0, 1.0)).all())
    base_N, *others = scores_NH.T
    tests = {}
    for head, scores_N in zip(HEADS_AND_RULES[1:], others, strict=True):
        tests[head] = {"p_value": paired_p(base_N, scores_N, rng)}
        if right_or_wrong:
            tests[head]["gained"] = int((scores_N > base_N).sum())
            tests[head]["lost"] = int((scores_N < base_N).sum())
    return tests


def _by_head(
    value_H: Values, drawn_RH: Values, num_items: int
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Return a metric of every head, and the others' differences from the base's head."""
    values = intervals_of(value_H, drawn_RH, num_items)
    changes = intervals_of(value_H - value_H[0], drawn_RH - drawn_RH[:, :1], num_items)
    return dict(zip(HEADS_AND_RULES, values, strict=True)), dict(
        zip(HEADS_AND_RULES[1:], changes[1:], strict=True)
    )
