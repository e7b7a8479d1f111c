"""Benchmarks through lm-eval: every request observed once, every head scored by lm-eval's own metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import resolve_max_length
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunError
from scale_cli.evaluation.benchmark_heads import ObservedHeads
from scale_cli.evaluation.benchmark_summary import (
    BenchmarkItems,
    Item,
    ItemOutcome,
    MeasuredBenchmarks,
    judging_metric,
    summarise_benchmarks,
)
from scale_cli.evaluation.benchmark_tasks import Benchmark, quiet_lm_eval
from scale_cli.evaluation.results import HEADS, SkippedBenchmark
from scale_cli.evaluation.statistics import finite
from scale_cli.model.heads import HeadedModel
from scale_cli.processes import Share, is_main, share
from scale_cli.storage.metrics import Losses


@dataclass(frozen=True)
class OpenedBenchmarks:
    """The benchmarks of a config, opened."""

    ready: list[Benchmark]  # what can be measured
    skipped: list[SkippedBenchmark]  # what cannot, and why

    def measure(self, model: HeadedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> MeasuredBenchmarks:
        """Measure every benchmark under every head of a model in evaluation mode."""
        measured, skipped = [], list(self.skipped)
        for benchmark, items in self._items(model, tokenizer, config, share()):
            if isinstance(items, RunError):
                skipped.append(SkippedBenchmark(benchmark.name, str(items)))
            else:
                measured.append(BenchmarkItems(benchmark.name, benchmark.source, items, benchmark.reports_macro_f1))
        results, averages = summarise_benchmarks(
            measured, num_resamples=config.evaluation.bootstrap_resamples, seed=config.seed
        )
        return MeasuredBenchmarks(results, averages, skipped, {done.name: done.items for done in measured})

    def accuracies(
        self, model: HeadedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig, share: Share
    ) -> Losses:
        """Return of every benchmark each head's mean of the metric that judges it, on the first items of every task."""
        return {
            benchmark.name: {
                head: finite(float(np.mean([item.heads[head].metrics[judged_by] for item in items]))) for head in HEADS
            }
            for benchmark, items in self._items(model, tokenizer, config, share, config.train.eval_max_items)
            if not isinstance(items, RunError) and (judged_by := judging_metric(items)) is not None
        }

    def _items(
        self,
        model: HeadedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        share: Share,
        max_items: int | None = None,
    ) -> Iterator[tuple[Benchmark, list[Item] | RunError]]:
        """Yield every benchmark with its items, or with the reason why lm-eval cannot measure it."""
        answers = ObservedHeads(
            model,
            tokenizer,
            config.method.router,
            max_length=resolve_max_length(model.config, tokenizer),
            batch_size=config.evaluation.batch_size,
            mixed_precision=config.evaluation.mixed_precision,
            share=share,
        )
        for benchmark in self.ready:
            answers.progress = f"evaluating {benchmark.name}" if is_main() else None
            try:
                yield benchmark, measure_items(benchmark, answers, max_items)
            except RunError as error:
                yield benchmark, error
            answers.forget()


def measure_items(benchmark: Benchmark, answers: ObservedHeads, max_items: int | None = None) -> list[Item]:
    """Return a benchmark's items, of every task at most so many, with lm-eval's metrics of each under every head.

    Raises:
        RunError: lm-eval cannot score a request, or reports nothing by which an item is right or wrong.
    """
    tasks, limit = benchmark.tasks, min(benchmark.source.limit or sys.maxsize, max_items or sys.maxsize)
    benchmark.seed_examples()
    with quiet_lm_eval():
        for task in tasks.values():
            task.build_all_requests(limit=limit)
    requests = [request for task in tasks.values() for request in task.instances]
    if benchmark.generates:
        answers.generate([request for request in requests for _ in range(request.repeats)])
    else:
        answers.loglikelihood(requests)
    samples: dict[str, Any] = {}
    for head in HEADS:
        answers.head = head
        benchmark.seed_examples()
        with quiet_lm_eval():
            samples[head] = evaluate(answers, {"tasks": tasks}, limit=limit, bootstrap_iters=0)["samples"]
    items = []
    for name in tasks:
        filters = list(dict.fromkeys(sample["filter"] for sample in samples["base"][name]))
        by_filter = [
            [[sample for sample in samples[head][name] if sample["filter"] == kept] for head in HEADS]
            for kept in filters
        ]
        if benchmark.generates:
            for of_item in zip(*(zip(*by_head, strict=True) for by_head in by_filter), strict=True):
                items.append(_generated_item(tasks[name], name, dict(zip(filters, of_item, strict=True))))
        else:
            for logged in zip(*by_filter[0], strict=True):
                items.append(_item(benchmark, name, dict(zip(HEADS, logged, strict=True))))
    if judging_metric(items) is None:
        raise RunError("lm-eval reports nothing by which an item is right or wrong")
    return items


def _generated_item(task: Any, task_name: str, logged: dict[str, Sequence[dict[str, Any]]]) -> Item:
    """Return an item whose answers are generated, with those metrics that are means over items, larger being better.

    Of what lm-eval logged, by filter, under every head.
    """
    means = [
        metric
        for metric, aggregated in task.aggregation().items()
        if getattr(aggregated, "__name__", "") == "mean" and task.higher_is_better().get(metric, True)
    ]
    samples = next(iter(logged.values()))
    outcomes = {}
    for place, head in enumerate(HEADS):
        metrics = {
            metric if len(logged) == 1 else f"{metric}, {name}": float(of_filter[place][metric])
            for name, of_filter in logged.items()
            for metric in means
            if isinstance(of_filter[place].get(metric), int | float | np.number)
        }
        outcomes[head] = ItemOutcome([], str(samples[place]["resps"][0][0]), metrics)
    return Item(task_name, samples[0]["doc_id"], str(samples[0]["target"]), outcomes)


def _item(benchmark: Benchmark, task_name: str, logged: dict[str, Any]) -> Item:
    task, sample = benchmark.tasks[task_name], logged["base"]
    if "acc" not in sample:
        raise RunError(f"lm-eval reports {', '.join(sample['metrics'])} of it, and no acc")
    choices = task.doc_to_choice(sample["doc"])
    # Where choices stand in the context (winogrande), what lm-eval calls text is the index of the right one.
    gold = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        gold = choices.index(gold) if gold in choices else -100  # lm-eval's own mark of an answer that is no choice
    outcomes = {}
    for head, of_head in logged.items():
        said = [float(response[0]) for response in of_head["filtered_resps"][: len(choices)]]
        metrics = {name: float(of_head[name]) for name in ("acc", "acc_norm") if name in of_head}
        outcomes[head] = ItemOutcome(said, int(np.argmax(said)), metrics)
    return Item(task_name, sample["doc_id"], gold, outcomes)
