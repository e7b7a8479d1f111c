"""The benchmarks of a config, and figures, intervals, tests and averages from their items.

lm-eval, which answers and marks the items, is an extra that takes seconds to import. So it is
imported only if a config names benchmarks.

Shapes: N items, H heads (in the order of HEADS_AND_RULES), M metrics, R resamples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    judging: dict[str, list[tuple[Values, Values, int]]] = {}  # of every benchmark, by language
    for index, benchmark in enumerate(measured):
        # An average over benchmarks needs independent resamples of each.
        rng = np.random.default_rng([seed, index])
        num_items = len(benchmark.items)
        scores_MNH = np.stack(list(benchmark.scores.values()))
        value_MH = scores_MNH.mean(axis=1)
        drawn_RMH = bootstrap(
            partial(_means, scores_MNH), num_items, num_resamples=num_resamples, rng=rng
        )
        of_metrics = {}
        for at, name in enumerate(benchmark.scores):
            of_metrics[name] = (value_MH[at], drawn_RMH[:, at], num_items)
        source = benchmark.source
        judging.setdefault(source.language, []).append(of_metrics[benchmark.judged_by])
        if benchmark.f1 is not None:  # no mean of items, so it gets no interval
            of_metrics["f1"] = (benchmark.f1, benchmark.f1[None], 1)

        by_metric = {name: _by_head(*of_metric) for name, of_metric in of_metrics.items()}
        tests = _tests(benchmark.scores[benchmark.judged_by], rng)
        heads = {
            head: BenchmarkHead(
                metrics={name: values[head] for name, (values, _) in by_metric.items()},
                differences={
                    name: changes[head]
                    for name, (_, changes) in by_metric.items()
                    if head != "base"
                },
                **tests.get(head, {}),
            )
            for head in HEADS_AND_RULES
        }
        results.append(
            BenchmarkResult(
                name=source.name,
                language=source.language,
                role=source.role,
                num_items=num_items,
                heads=heads,
                judged_by=benchmark.judged_by,
            )
        )

    for head in HEADS_AND_RULES[1:]:
        p_values = [result.heads[head].p_value for result in results]
        for result, p_holm in zip(results, holm(p_values), strict=True):
            result.heads[head] = replace(result.heads[head], p_holm=p_holm)

    averages = []
    for language, of_language in judging.items():
        values, drawn, counts = zip(*of_language, strict=True)
        figures = _by_head(np.mean(values, axis=0), np.mean(drawn, axis=0), min(counts))
        averages.append(LanguageAverage(language, len(of_language), *figures))
    return results, averages


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
