"""Benchmarks through lm-eval: every request observed once, every head scored by lm-eval's own metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import resolve_max_length

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import RunError
from scale_cli.evaluation.benchmark_heads import ObservedHeads
from scale_cli.evaluation.benchmark_summary import (
    BenchmarkItems,
    Item,
    ItemOutcome,
    MeasuredBenchmarks,
    summarise_benchmarks,
)
from scale_cli.evaluation.benchmark_tasks import Benchmark, open_benchmarks, quiet_lm_eval
from scale_cli.evaluation.results import HEADS, SkippedBenchmark
from scale_cli.model.heads import HeadedModel
from scale_cli.processes import is_main, share
from scale_cli.upscale.base import load_base_config
from scale_cli.upscale.vocabulary import load_run_tokenizer


@dataclass(frozen=True)
class OpenedBenchmarks:
    """The benchmarks of a config, opened."""

    ready: list[Benchmark]  # what can be measured
    skipped: list[SkippedBenchmark]  # what cannot, and why

    @classmethod
    def open(cls, sources: list[BenchmarkSource]) -> OpenedBenchmarks:
        """Open every benchmark of a config.

        Raises:
            ConfigError: lm-eval has no task of that name, or a prompt does not fit.
            CorpusError: a local file cannot be read.
        """
        return cls(*open_benchmarks(sources))

    def measure(self, model: HeadedModel, config: RunConfig) -> MeasuredBenchmarks:
        """Measure every benchmark under every head.

        Args:
            model: in evaluation mode.
            config: for the base's tokenizer, the router's settings, the sizes of batches and the bootstrap.
        """
        tokenizer = load_run_tokenizer(config)
        answers = ObservedHeads(
            model,
            tokenizer,
            config.method.router,
            max_length=resolve_max_length(load_base_config(config.model), tokenizer),
            batch_size=config.evaluation.batch_size,
            mixed_precision=config.evaluation.mixed_precision,
            share=share(),
        )
        measured, skipped = [], list(self.skipped)
        for benchmark in self.ready:
            answers.progress = f"evaluating {benchmark.name}" if is_main() else None
            try:
                items = measure_items(benchmark, answers)
                measured.append(BenchmarkItems(benchmark.name, benchmark.source, items, benchmark.reports_macro_f1))
            except RunError as error:
                skipped.append(SkippedBenchmark(benchmark.name, str(error)))
            answers.forget()
        results, averages = summarise_benchmarks(
            measured, num_resamples=config.evaluation.bootstrap_resamples, seed=config.seed
        )
        return MeasuredBenchmarks(results, averages, skipped, {done.name: done.items for done in measured})


def measure_items(benchmark: Benchmark, answers: ObservedHeads) -> list[Item]:
    """Return a benchmark's items, with lm-eval's metrics of each under every head.

    Raises:
        RunError: lm-eval cannot score a request, or reports no accuracy.
    """
    tasks = benchmark.tasks
    benchmark.seed_examples()
    with quiet_lm_eval():
        for task in tasks.values():
            task.build_all_requests(limit=benchmark.limit)
    answers.loglikelihood([request for task in tasks.values() for request in task.instances])
    samples: dict[str, Any] = {}
    for head in HEADS:
        answers.head = head
        benchmark.seed_examples()
        with quiet_lm_eval():
            samples[head] = evaluate(answers, {"tasks": tasks}, limit=benchmark.limit, bootstrap_iters=0)["samples"]
    items = []
    for name in tasks:
        by_head = [samples[head][name] for head in HEADS]
        first_filter = by_head[0][0]["filter"]
        for logged in zip(*by_head, strict=True):
            if logged[0]["filter"] == first_filter:
                items.append(_item(benchmark, name, dict(zip(HEADS, logged, strict=True))))
    return items


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
    subtask = task_name if benchmark.files is None else benchmark.files[sample["doc_id"]]
    return Item(subtask, sample["doc_id"], gold, outcomes)
