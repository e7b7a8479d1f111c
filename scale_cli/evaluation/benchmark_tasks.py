"""Benchmarks of lm-eval: every head answers the items of its tasks, and lm-eval's metrics mark the answers.

A request is a context and a continuation. Both pass the model once, which gives the scores of every head and of both
routing rules. The router reads the context, as it does when the model is served. lm-eval's own `hf` model encodes,
truncates from the left, and generates.

Shapes: K heads (base, trained), H those and both routing rules, B requests of a batch, T positions.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import lm_eval.utils
import numpy as np
import torch
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
from lm_eval.tasks import TaskManager
from lm_eval.tasks.kobest.utils import macro_f1_score
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import parse, read_text
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, RunError, one_line
from scale_cli.evaluation.benchmarks import BenchmarkItems, Item, ItemOutcome, check_task_file
from scale_cli.evaluation.results import HEADS, SkippedBenchmark
from scale_cli.evaluation.scoring import observe, score_tokens
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import HeadedModel, TokenLogProbs
from scale_cli.processes import ALONE, Share, is_main, lowered_dtype, shared_out
from scale_cli.terminal import progress_bar

_FORMS = (
    "arrow",
    "csv",
    "json",
    "parquet",
    "text",
)  # of local files; datasets has other formats, pickles among them
# lm-eval's own seed for few-shot examples, and for tasks that sample their answers.
_SEED = 1234
# A context and a continuation, as text and as token ids, as lm-eval passes them.
Encoded = tuple[tuple[str, str], list[int], list[int]]
# Templates are untrusted data: the sandbox gives them access to the item only.
_sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_sandbox.filters.update(lm_eval.utils.env.filters)
lm_eval.utils.env = _sandbox
# With this package lm-eval would download a metric's Python from the hub and run it. So its import must fail.
sys.modules["evaluate"] = None  # type: ignore[assignment]
logging.getLogger("lm_eval").setLevel(logging.CRITICAL)  # the report says what matters


class ObservedHeads(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """An lm-eval model that answers with `head`, which may be changed between two evaluations."""

    def __init__(
        self,
        model: HeadedModel,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        router: RouterConfig,  # settings of both rules, whatever the model serves
        *,
        max_length: int,  # tokens that the model reads at once
        batch_size: int,  # requests at once
        mixed_precision: str,
        progress: str | None = None,  # label of the progress bar; None for no bar
        share: Share = ALONE,  # this process's share of the batches; each process returns all answers
    ) -> None:
        super().__init__(
            SelectableHeads(model, router),
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval adds a token for padding
            max_length=max_length,
            batch_size=batch_size,
            mixed_precision_dtype=lowered_dtype(mixed_precision),
        )
        self.head = "base"
        self._headed, self._router, self._mixed_precision = model, router, mixed_precision
        self._progress, self._share = progress, share
        self._stderr = sys.stderr  # for the bar; lm-eval's own output there is discarded
        self._scores: dict[tuple[str, str], dict[str, float]] = {}

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the chosen head's log-likelihood of each continuation, computed once; `is_greedy` is always False."""
        unseen = {request.args: request for request in requests if request.args not in self._scores}
        if unseen:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(self._scores[request.args][self.head], False) for request in requests]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both; white space that ends a context goes to the continuation, and may be all of it."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids

    def _loglikelihood_tokens(self, requests: list[Encoded], **_: Any) -> list[tuple[float, bool]]:
        for (context, continuation), _context_ids, continuation_ids in requests:
            if not 0 < len(continuation_ids) <= self.max_length:
                raise RunError(
                    f"{continuation!r} after {context[-40:]!r} has {len(continuation_ids)} tokens, "
                    f"but lm-eval can score only 1 to {self.max_length}"
                )
        longest_first = sorted(requests, key=lambda request: -len(request[1]) - len(request[2]))
        batches = [
            longest_first[at : at + self.batch_size]
            for at in range(0, len(requests), self.batch_size)
        ]
        with self._bar(len(requests), " requests") as bar:
            for (text, _context, _continuation), said_1H in shared_out(
                batches, self._share, self._observe, bar.update
            ):
                self._scores[text] = dict(zip(HEADS, said_1H[0].tolist(), strict=True))
        return [(self._scores[text][self.head], False) for text, _, _ in requests]

    def _observe(self, batch: Sequence[Encoded]) -> Sequence[Tensor]:
        """Return (1, H) for each request of a batch: its log-likelihood by each head and rule of HEADS."""
        rows = [
            torch.tensor((context + continuation)[-self.max_length - 1 :])
            for _, context, continuation in batch
        ]
        tokens = observe(self._headed, self._mixed_precision, rows)
        ends_B = torch.tensor([len(row) - 1 for row in rows])
        starts_B = ends_B - torch.tensor([len(continuation) for _, _, continuation in batch])
        at_T = torch.arange(int(ends_B.max()))
        scored_BT = (at_T >= starts_B[:, None]) & (at_T < ends_B[:, None])
        said, _ = score_tokens(
            TokenLogProbs(tokens.log_probs_KBT.cpu(), tokens.cosine_BT.cpu()), self._router
        )
        said_BH = torch.stack(
            [torch.where(scored_BT, said[head], 0.0).sum(dim=-1) for head in HEADS], dim=1
        )
        return said_BH.split(1)

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        self.model.head = self.head

        def answer(batch: Sequence[int]) -> list[Tensor]:
            torch.manual_seed(_SEED)
            texts = HFLM.generate_until(self, [requests[at] for at in batch], disable_tqdm=True)
            return [
                torch.tensor(list(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)
                for text in texts
            ]

        batches, answers = self._generation_batches(requests), [""] * len(requests)
        with self._bar(len(requests), f" answers of {self.head}") as bar:
            for at, encoded in shared_out(batches, self._share, answer, bar.update):
                answers[at] = bytes(encoded.tolist()).decode("utf-8", "surrogatepass")
        return answers

    def _generation_batches(self, requests: list[Any]) -> list[list[int]]:
        """Return batches of request indices, cut before they are shared: the number of processes changes no answer."""
        by_options = defaultdict(list)
        for at, request in enumerate(requests):
            by_options[repr(request.args[1])].append(at)
        batches = []
        for alike in by_options.values():
            length = normalize_gen_kwargs(requests[alike[0]].args[1], self.max_gen_toks)[
                "max_gen_toks"
            ]
            if length >= self.max_length:
                raise RunError(
                    f"it asks for answers of {length:,} tokens, but the model's context is {self.max_length:,}"
                )
            contexts = {at: requests[at].args[0] for at in alike}
            alike.sort(key=lambda at: (-len(self.tok_encode(contexts[at])), contexts[at]))
            batches += [
                alike[at : at + self.batch_size] for at in range(0, len(alike), self.batch_size)
            ]
        return batches

    @contextmanager
    def _bar(self, total: int, unit: str) -> Iterator[Any]:
        shown = self._progress is not None
        with (
            redirect_stderr(self._stderr),
            progress_bar(
                total=total, desc=self._progress, unit=unit, disable=not shown, leave=False
            ) as bar,
        ):
            yield bar


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured."""

    name: str  # in the report
    source: BenchmarkSource  # its entry in the config
    tasks: dict[str, Any]  # lm-eval's tasks by name; several if the name is a group's

    @property
    def reports_macro_f1(self) -> bool:
        """Whether lm-eval reports macro-F1 for its tasks, as for KoBEST's."""
        return any(
            task.OUTPUT_TYPE == "multiple_choice" and task.aggregation().get("f1") is macro_f1_score
            for task in self.tasks.values()
        )


@dataclass(frozen=True)
class OpenedBenchmarks:
    """The benchmarks of a config, opened."""

    ready: list[Benchmark]  # what can be measured
    skipped: list[SkippedBenchmark]  # what cannot, and why

    def measure(
        self,
        model: HeadedModel,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        share: Share,
        max_items: int | None = None,  # per task
    ) -> tuple[list[BenchmarkItems], list[SkippedBenchmark]]:
        """Return each benchmark's items under every head, and the benchmarks that could not be measured."""
        measured, skipped = [], list(self.skipped)
        for benchmark in self.ready:
            answers = ObservedHeads(
                model,
                tokenizer,
                config.method.router,
                max_length=resolve_max_length(model.config, tokenizer),
                batch_size=config.evaluation.batch_size,
                mixed_precision=config.evaluation.mixed_precision,
                progress=f"evaluating {benchmark.name}" if is_main() else None,
                share=share,
            )
            try:
                measured.append(measure_items(benchmark, answers, max_items))
            except RunError as error:
                skipped.append(SkippedBenchmark(benchmark.name, str(error)))
        return measured, skipped


def open_benchmarks(sources: list[BenchmarkSource]) -> OpenedBenchmarks:
    """Open the benchmarks, and list those that cannot be measured; a mistake of the config raises ConfigError."""
    opened = OpenedBenchmarks([], [])
    for source in sources:
        check_task_file(source)
    # The bar keeps the terminal's stderr. lm-eval and datasets get none, since they draw a bar for every task.
    bar = progress_bar(iterable=sources, desc="opening benchmarks", unit=" benchmarks", leave=False)
    with redirect_stderr(io.StringIO()):
        for source in bar:
            try:
                tasks = (
                    _find_tasks(source)
                    if source.path is None
                    else {source.name: _read_task(source, source.path)}
                )
                _check_measurable(tasks)
            except RunError as error:
                opened.skipped.append(SkippedBenchmark(source.name, str(error)))
                continue
            for task in tasks.values():
                # As in lm-eval, a task that says 0 stays at 0.
                if source.num_fewshot is not None and task.get_config("num_fewshot") != 0:
                    task.set_config("num_fewshot", source.num_fewshot)
                if task.get_config("num_fewshot") is None:
                    task.set_config("num_fewshot", 0)
            # A group's items are pooled, as lm-eval weights its tasks by size. F1 over different classes cannot be.
            whole = Benchmark(source.name, source, tasks)
            parts = [Benchmark(name, source, {name: task}) for name, task in tasks.items()]
            opened.ready.extend(parts if whole.reports_macro_f1 else [whole])
    names = [benchmark.name for benchmark in opened.ready]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"evaluation.benchmarks: {twice[0]} is named twice, once within a group; remove one"
        )
    return opened


def _read_task(source: BenchmarkSource, path: str) -> Any:
    """Return a task that a user wrote for lm-eval; its data are local files, and it runs no code."""
    config = parse(read_text(Path(path)), path)
    if not isinstance(config, dict) or {"group", "include"} & config.keys():
        raise ConfigError(
            f"{path}: not a single lm-eval task: it must be a mapping without group and include"
        )
    form = config.get("dataset_path")
    if form not in _FORMS:
        raise ConfigError(
            f"{path}: dataset_path: must be one of {', '.join(_FORMS)}, which read local files"
        )

    def load(**kwargs: Any) -> Any:
        with TemporaryDirectory() as cache:  # removed afterwards
            return datasets.load_dataset(form, **kwargs, cache_dir=cache, keep_in_memory=True)

    try:
        for metric in config.get("metric_list") or []:
            if (
                metric.get("aggregation") == "macro_f1"
            ):  # lm-eval's own YAML names a function instead
                metric["aggregation"] = macro_f1_score
        return ConfigurableTask(config=config | {"task": source.name, "custom_dataset": load})
    except Exception as error:  # from lm-eval, datasets or a template
        raise ConfigError(f"{path}: {one_line(error)}") from None


def _find_tasks(source: BenchmarkSource) -> dict[str, Any]:
    """Return lm-eval's tasks of a name; ConfigError if there are none, RunError if they cannot be opened."""
    if source.name not in _all_tasks().task_index:
        raise ConfigError(f"evaluation.benchmarks: lm-eval has no task {source.name!r}")
    try:
        tasks: dict[str, Any] = _all_tasks().load([source.name])["tasks"]
    except Exception as error:  # a task is YAML, Python and a download: it may fail in any way, and others still run
        raise RunError(one_line(error)) from None
    return tasks


@cache
def _all_tasks() -> Any:
    return (
        TaskManager()
    )  # reads 14,000 files, which takes seconds: only for a task by name, and once


def _check_measurable(tasks: dict[str, Any]) -> None:
    kinds = sorted({str(task.OUTPUT_TYPE) for task in tasks.values()})
    if kinds not in (["multiple_choice"], ["generate_until"]):
        named = ", ".join(kinds)
        raise RunError(
            f"only multiple_choice and generate_until are measured, one kind per benchmark; this is {named}"
        )
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise RunError("it runs code that the model writes")
        for name, metric in getattr(task, "_metric_fn_list", {}).items():
            # lm-eval does not call this function for multiple choice.
            if metric is None and kinds == ["generate_until"]:
                raise RunError(
                    f"{name} is not one of lm-eval's own metrics, and scale fetches no code from the hub"
                )


def measure_items(
    benchmark: Benchmark, answers: ObservedHeads, max_items: int | None = None
) -> BenchmarkItems:
    """Return a benchmark's items, at most `max_items` per task, with lm-eval's metrics for each under every head.

    Raises:
        RunError: lm-eval cannot score a request, or reports no metric by which an item is right or wrong.
    """
    limit = min(benchmark.source.limit or sys.maxsize, max_items or sys.maxsize)
    # What lm-eval logged by task and item, then by head: one sample for each filter.
    logged: dict[tuple[str, int], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for answers.head in HEADS:
        for task in benchmark.tasks.values():
            task.set_fewshot_seed(_SEED)  # all heads get the same examples
        with redirect_stderr(io.StringIO()):
            found: Any = evaluate(
                answers, {"tasks": benchmark.tasks}, limit=limit, bootstrap_iters=0
            )
        for name in benchmark.tasks:
            for sample in found["samples"][name]:
                logged[name, sample["doc_id"]][answers.head].append(sample)
    items = []
    for (name, doc_id), by_head in logged.items():
        task = benchmark.tasks[name]
        gold, outcomes = (_chosen if task.OUTPUT_TYPE == "multiple_choice" else _generated)(
            task, by_head
        )
        items.append(Item(name, doc_id, gold, outcomes))
    measured = BenchmarkItems(benchmark.source, benchmark.name, items, benchmark.reports_macro_f1)
    if measured.judged_by is None:
        raise RunError("lm-eval reports no metric that says whether an item is right")
    return measured


def _chosen(
    task: Any, by_head: dict[str, list[Any]]
) -> tuple[int | list[int], dict[str, ItemOutcome]]:
    """Return an item's right choice, and every head's outcome."""
    sample = by_head["base"][0]
    if "acc" not in sample:
        raise RunError(f"lm-eval reports {', '.join(sample['metrics'])} for it, but no acc")
    choices = task.doc_to_choice(sample["doc"])
    # If the choices are in the context (winogrande), lm-eval's text is the index of the right one.
    gold = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        gold = (
            choices.index(gold) if gold in choices else -100
        )  # lm-eval's own mark for an answer that is not a choice
    outcomes = {}
    for head, (of_head, *_) in by_head.items():
        said = [float(response[0]) for response in of_head["filtered_resps"][: len(choices)]]
        metrics = {name: float(of_head[name]) for name in ("acc", "acc_norm") if name in of_head}
        outcomes[head] = ItemOutcome(said, int(np.argmax(said)), metrics)
    return gold, outcomes


def _generated(task: Any, by_head: dict[str, list[Any]]) -> tuple[str, dict[str, ItemOutcome]]:
    """Return the expected answer, and every head's outcome with the metrics that are means and better if higher."""
    means = [
        metric
        for metric, aggregated in task.aggregation().items()
        if getattr(aggregated, "__name__", "") == "mean"
        and task.higher_is_better().get(metric, True)
    ]
    outcomes = {}
    for head, samples in by_head.items():
        metrics = {
            metric if len(samples) == 1 else f"{metric}, {sample['filter']}": float(sample[metric])
            for sample in samples
            for metric in means
            if isinstance(sample.get(metric), int | float | np.number)
        }
        outcomes[head] = ItemOutcome([], str(samples[0]["resps"][0][0]), metrics)
    return str(by_head["base"][0]["target"]), outcomes
