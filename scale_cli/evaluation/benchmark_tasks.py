"""Benchmarks of lm-eval: every head answers a task's items, and lm-eval's metrics mark them.

A request is a context and a continuation. Both pass the model once, which gives the scores of every
head and of both routing rules. The router reads the context, as it does when the model is served.

Every head is asked as lm-eval's `hf` model asks the folder that serves it. The base's head is the
plain base with its own tokenizer. For every other head it is the export's tokenizer, which has the
run's new tokens, and puts the boundary before a text that stood before a document in training.
Where the two give the same ids, a request passes the model once for all heads; else the base alone
reads its own.

Shapes: C numbers of a token (`scoring.py`), B requests of a batch, T positions.
"""

from __future__ import annotations

import ast
import copy
import io
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import lm_eval.utils
import numpy as np
import torch
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import configure_pad_token, normalize_gen_kwargs, resolve_max_length
from lm_eval.tasks import TaskManager
from lm_eval.tasks.kobest.utils import macro_f1_score
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scale_cli.config.load import parse, read_text
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.data.encoding import DocumentMarkers, prompt_ids
from scale_cli.errors import ConfigError, CorpusError, RunError, one_line
from scale_cli.evaluation.benchmarks import BenchmarkItems, Item, ItemOutcome
from scale_cli.evaluation.results import HEADS, SkippedBenchmark
from scale_cli.evaluation.scoring import (
    BaseAlone,
    Passes,
    observe,
    routed_rows,
)
from scale_cli.evaluation.selectable_heads import SelectableHeads
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import HeadedModel
from scale_cli.processes import ALONE, Share, is_main, lowered_dtype, map_over_processes
from scale_cli.terminal import progress_bar
from scale_cli.upscale.base_tokenizer import load_tokenizer

# Formats of local files; datasets has others, pickles among them.
_FORMS = ("arrow", "csv", "json", "parquet", "text")
_FOREIGN_METRIC = "{} is not one of lm-eval's own metrics, and scale fetches no code from the hub"
# lm-eval's own seed for few-shot examples, and for tasks that sample their answers.
_SEED = 1234
# A context and a continuation, as text and as token ids, as lm-eval passes them.
Encoded = tuple[tuple[str, str], list[int], list[int]]
# Templates of a user's file are untrusted: the sandbox gives them access to the item only.
_SANDBOX = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_SANDBOX.filters["regex_replace"] = lm_eval.utils.regex_replace
_TEMPLATES = ("doc_to_text", "doc_to_choice", "doc_to_target")
# Other keys of a user's file; the values of these are data, and none of them names code.
_KEYS = (
    *_TEMPLATES,
    "task",
    "tag",
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "output_type",
    "generation_kwargs",
    "num_fewshot",
    "repeats",
    "metric_list",
    "filter_list",
    "metadata",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
)
# Otherwise lm-eval would download the Python of metrics that are not its own, and run it.
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
logging.getLogger("lm_eval").setLevel(logging.CRITICAL)  # the report says what matters


def framed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that begins a text as an export's: with the boundary of documents."""
    boundary = DocumentMarkers.of(tokenizer).context
    if boundary is None or tokenizer("a").input_ids == prompt_ids(tokenizer, "a"):
        return tokenizer
    token = str(tokenizer.convert_ids_to_tokens(boundary))
    exported = copy.deepcopy(tokenizer)
    exported.backend_tokenizer.post_processor = TemplateProcessing(
        single=[token, "$A"], special_tokens=[(token, boundary)]
    )
    return exported


class ObservedHeads(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """An lm-eval model that answers with one head, which may be changed between two evaluations."""

    tokenizer: Any

    def __init__(
        self,
        model: HeadedModel,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,  # the run's own, which begins a text as the base's does
        router: RouterConfig,  # settings of both rules, whatever the model serves
        passes: Passes,
        *,
        of_base: PreTrainedTokenizerBase | None = None,  # the base's, if the run has new tokens
        max_length: int,  # tokens that the model reads at once
        share: Share = ALONE,  # of the batches; each process returns all answers
    ) -> None:
        super().__init__(
            SelectableHeads(model, router),
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval adds a token for padding
            max_length=max_length,
            batch_size=passes.batch_size,
            mixed_precision_dtype=lowered_dtype(passes.mixed_precision),
        )
        self.bar = progress_bar(total=0, disable=True)  # of tokens that are scored, or of answers
        self._headed = model
        self._router = router
        self._passes = passes
        self._share = share
        self._of_export = framed(self.tokenizer)
        self._of_base = self.tokenizer
        if of_base is not None:
            self._of_base = configure_pad_token(copy.deepcopy(of_base), model_config=self.config)
        self._answering = self.model
        self._base = BaseAlone(model)
        # By tokenizer, then by context and continuation: a log-likelihood of each head and rule.
        self._scores: dict[int, dict[tuple[str, str], dict[str, float]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self.answer_with("base")

    def answer_with(self, head: str) -> None:
        self.head = head
        self._answering.head = head
        self._model = self._base.base if head == "base" else self._answering
        self.tokenizer = self._of_base if head == "base" else self._of_export

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the chosen head's log-likelihoods of continuations; `is_greedy` is False."""
        scores = self._scores[id(self.tokenizer)]
        if unseen := {request.args: request for request in requests if request.args not in scores}:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(scores[request.args][self.head], False) for request in requests]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both; white space that ends a context goes to the continuation."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids

    def _loglikelihood_tokens(self, requests: list[Encoded], **_: Any) -> None:
        """Score requests by every head and rule that reads such ids, and keep the scores."""
        rows = []
        for (context, continuation), context_ids, continuation_ids in requests:
            if not 0 < len(continuation_ids) <= self.max_length:
                raise RunError(
                    f"{continuation!r} after {context[-40:]!r} has {len(continuation_ids)} tokens, "
                    f"but lm-eval can score only 1 to {self.max_length}"
                )
            # What is too long loses its beginning, as in lm-eval.
            rows.append(torch.tensor((context_ids + continuation_ids)[-self.max_length - 1 :]))
        self.bar.total += sum(len(row) - 1 for row in rows)

        # Only the base's head is asked with the base's ids, unless an export reads the same.
        if self.tokenizer is self._of_export:
            observed = observe(self._headed, rows, self._passes, self._share, self.bar)
            scored = routed_rows(observed, self._router)
        else:
            observed = observe(self._base, rows, self._passes, self._share, self.bar)
            scored = routed_rows(observed, self._router, ["base"])

        scores = self._scores[id(self.tokenizer)]
        for batch in scored:
            for row, place in enumerate(batch.places):
                end = observed[place].shape[1]
                begin = end - len(requests[place][2])
                for head, log_probs_BT in batch.log_probs.items():
                    scores[requests[place][0]][head] = float(log_probs_BT[row, begin:end].sum())

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Return the chosen head's answers; batches are cut before processes share them."""
        by_options = defaultdict(list)
        for index, request in enumerate(requests):
            by_options[repr(request.args[1])].append(index)

        batches = []
        for alike in by_options.values():
            options = normalize_gen_kwargs(requests[alike[0]].args[1], self.max_gen_toks)
            if options["max_gen_toks"] >= self.max_length:
                raise RunError(
                    f"it asks for answers of {options['max_gen_toks']:,} tokens, "
                    f"but the model's context is {self.max_length:,}"
                )
            contexts = {index: requests[index].args[0] for index in alike}
            alike.sort(key=lambda index: (-len(self.tok_encode(contexts[index])), contexts[index]))
            size = self.batch_size
            batches += [alike[first : first + size] for first in range(0, len(alike), size)]

        def answer(batch: Sequence[int]) -> list[Tensor]:
            torch.manual_seed(_SEED)
            texts = HFLM.generate_until(self, [requests[at] for at in batch], disable_tqdm=True)
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
            return [torch.tensor(list(text), dtype=torch.uint8) for text in encoded]

        self.bar.total += len(requests)
        answered = dict(map_over_processes(batches, self._share, answer, self.bar.update))
        return [
            bytes(answered[index].tolist()).decode("utf-8", "surrogatepass")
            for index in range(len(requests))
        ]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured."""

    name: str  # in the report
    source: BenchmarkSource  # its entry in the config
    tasks: dict[str, Any]  # lm-eval's tasks by name; several if the name is a group's

    @property
    def is_generated(self) -> bool:
        return all(task.OUTPUT_TYPE == "generate_until" for task in self.tasks.values())

    @property
    def reports_macro_f1(self) -> bool:
        """Whether lm-eval reports macro-F1 for its tasks, as for KoBEST's."""
        return not self.is_generated and any(
            task.aggregation().get("f1") is macro_f1_score for task in self.tasks.values()
        )


@dataclass(frozen=True)
class OpenedBenchmarks:
    """The benchmarks of a config, opened."""

    ready: list[Benchmark]  # what can be measured
    skipped: list[SkippedBenchmark]  # what cannot, and why

    @property
    def num_items(self) -> int:
        return sum(
            min(benchmark.source.limit or sys.maxsize, len(task.eval_docs))
            for benchmark in self.ready
            for task in benchmark.tasks.values()
        )

    def measure(
        self,
        model: HeadedModel,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        share: Share,
        max_items: int | None = None,  # per task
    ) -> tuple[list[BenchmarkItems], list[SkippedBenchmark]]:
        """Return each benchmark's items under every head, and what could not be measured."""
        measured = []
        skipped = list(self.skipped)
        has_new_tokens = config.method.vocabulary is not None
        of_base = load_tokenizer(config.model) if has_new_tokens else None
        for benchmark in self.ready:
            answers = ObservedHeads(
                model,
                tokenizer,
                config.method.router,
                Passes.of(config),
                of_base=of_base,
                max_length=resolve_max_length(model.config, tokenizer),
                share=share,
            )
            try:
                measured.append(measure_items(benchmark, answers, max_items))
            except RunError as error:
                skipped.append(SkippedBenchmark(benchmark.name, str(error)))
        return measured, skipped


def open_benchmarks(sources: list[BenchmarkSource]) -> OpenedBenchmarks:
    """Open the benchmarks, and list those that cannot be measured.

    Raises ConfigError for a mistake in the config.
    """
    opened = OpenedBenchmarks([], [])
    for source in sources:
        if source.path is not None and not Path(source.path).is_file():
            raise CorpusError(f"{source.name}: no such file: {source.path}")

    # The bar keeps the terminal's stderr. lm-eval and datasets get none: they draw many bars.
    bar = progress_bar(iterable=sources, desc="opening benchmarks", unit=" benchmarks", leave=False)
    with redirect_stderr(io.StringIO()):
        for source in bar:
            try:
                tasks = _named_tasks(source) if source.path is None else _read_task(source)
                _check_measurable(tasks)
            except RunError as error:
                opened.skipped.append(SkippedBenchmark(source.name, str(error)))
                continue
            for task in tasks.values():
                shown = task.get_config("num_fewshot")
                if shown != 0 and source.num_fewshot is not None:  # 0 stays 0, as in lm-eval
                    shown = source.num_fewshot
                task.set_config("num_fewshot", shown or 0)
            # A group's items are pooled, as lm-eval weights its tasks by size. F1 over different
            # classes cannot be.
            whole = Benchmark(source.name, source, tasks)
            parts = [Benchmark(name, source, {name: task}) for name, task in tasks.items()]
            opened.ready.extend(parts if whole.reports_macro_f1 else [whole])

    names = [benchmark.name for benchmark in opened.ready]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"evaluation.benchmarks: {name} is named twice, once within a group; remove one"
            )
    return opened


def _read_task(source: BenchmarkSource) -> dict[str, Any]:
    """Return a task that a user wrote; its data are local files, and it runs no code."""
    path = str(source.path)
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
    if unknown := sorted(config.keys() - set(_KEYS)):
        raise ConfigError(f"{path}: {unknown[0]}: a task's file may have {', '.join(_KEYS)}")
    if "{" in str(config.get("description", "")):
        raise ConfigError(f"{path}: description: must be plain text, not a template")

    def load(**kwargs: Any) -> Any:
        with TemporaryDirectory() as cache:  # removed afterwards
            return datasets.load_dataset(form, **kwargs, cache_dir=cache, keep_in_memory=True)

    try:
        has_choices = config.get("doc_to_choice") is not None
        for key in _TEMPLATES:
            template = config.get(key)
            # What has no brace is a column's name or plain text, which lm-eval does not compute.
            if isinstance(template, str) and "{" in template:
                config[key] = _filled(template, key, has_choices=has_choices)
        for metric in config.get("metric_list") or []:
            metric.pop("hf_evaluate", None)  # it asks for the hub's code in place of lm-eval's own
            if metric.get("metric") not in metric_registry:
                raise RunError(_FOREIGN_METRIC.format(metric.get("metric")))
            if metric.get("aggregation") == "macro_f1":  # lm-eval's own YAML names a function
                metric["aggregation"] = macro_f1_score
        config.pop("metadata", None)  # lm-eval would pass it to `load`
        task = ConfigurableTask(config=config | {"task": source.name, "custom_dataset": load})
    except RunError:
        raise
    except Exception as error:  # from lm-eval, datasets or a template
        raise ConfigError(f"{path}: {one_line(error)}") from None
    return {source.name: task}


def _filled(template: str, key: str, *, has_choices: bool) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that fills a template in the sandbox, and reads values as lm-eval does."""
    compiled = _SANDBOX.from_string(template)

    def fill(item: Mapping[str, Any]) -> Any:
        text = compiled.render(**item)
        if key == "doc_to_choice" or (text.isdigit() and has_choices):
            return ast.literal_eval(text)
        if key == "doc_to_target" and len(text) >= 2 and text[0] + text[-1] == "[]":
            with suppress(SyntaxError, ValueError):
                return ast.literal_eval(text)
        return text

    return fill


@cache
def _all_tasks() -> Any:
    """Return all of lm-eval's tasks: 14,000 files, which take seconds to read."""
    return TaskManager()


def _named_tasks(source: BenchmarkSource) -> dict[str, Any]:
    """Return lm-eval's tasks of a name; RunError if they cannot be opened."""
    if source.name not in _all_tasks().task_index:
        raise ConfigError(f"evaluation.benchmarks: lm-eval has no task {source.name!r}")
    # A task may load a metric by its name, for which this folder's code would be taken.
    for script in sorted(Path().glob("*/*.py")):
        if script.stem == script.parent.name:
            raise RunError(
                f"lm-eval might run {script} of this folder as a metric; "
                "start scale in another folder"
            )
    try:
        tasks: dict[str, Any] = _all_tasks().load([source.name])["tasks"]
    except Exception as error:  # a task is YAML, Python and a download: it may fail in any way
        raise RunError(one_line(error)) from None
    return tasks


def _check_measurable(tasks: dict[str, Any]) -> None:
    kinds = sorted({str(task.OUTPUT_TYPE) for task in tasks.values()})
    if kinds not in (["multiple_choice"], ["generate_until"]):
        raise RunError(
            "only multiple_choice and generate_until are measured, one kind per benchmark; "
            f"this is {', '.join(kinds)}"
        )
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise RunError("it runs code that the model writes")
        for name, metric in getattr(task, "_metric_fn_list", {}).items():
            # lm-eval does not call this function for multiple choice.
            if metric is None and kinds == ["generate_until"]:
                raise RunError(_FOREIGN_METRIC.format(name))


def measure_items(
    benchmark: Benchmark, answers: ObservedHeads, max_items: int | None = None
) -> BenchmarkItems:
    """Return a benchmark's items, at most `max_items` per task, marked under every head.

    Raises:
        RunError: lm-eval cannot score a request, or says of no item whether it is right.
    """
    limit = min(benchmark.source.limit or sys.maxsize, max_items or sys.maxsize)
    # What lm-eval logged by task and item, then by head: one sample for each filter.
    logged: dict[tuple[str, int], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    answers.bar = progress_bar(
        total=0,
        desc=f"evaluating {benchmark.name}",
        unit=" answers" if benchmark.is_generated else " tokens",
        unit_scale=not benchmark.is_generated,
        disable=not is_main(),
        leave=False,
    )
    with answers.bar, redirect_stderr(io.StringIO()):
        for head in HEADS:
            answers.answer_with(head)
            for task in benchmark.tasks.values():
                task.set_fewshot_seed(_SEED)  # all heads get the same examples
            try:
                found: Any = evaluate(
                    answers, {"tasks": benchmark.tasks}, limit=limit, bootstrap_iters=0
                )
            except (TemplateError, LookupError, SyntaxError, TypeError, ValueError) as error:
                raise RunError(one_line(error)) from None  # of an item that its task does not fit
            for name in benchmark.tasks:
                for sample in found["samples"][name]:
                    logged[name, sample["doc_id"]][head].append(sample)

    outcomes_of = _generated if benchmark.is_generated else _chosen
    items = [
        Item(name, doc_id, *outcomes_of(benchmark.tasks[name], by_head))
        for (name, doc_id), by_head in logged.items()
    ]
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
        # lm-eval's own mark for an answer that is not a choice
        gold = choices.index(gold) if gold in choices else -100
    outcomes = {}
    for head, (of_head, *_) in by_head.items():
        said = [float(response[0]) for response in of_head["filtered_resps"][: len(choices)]]
        metrics = {name: float(of_head[name]) for name in ("acc", "acc_norm") if name in of_head}
        outcomes[head] = ItemOutcome(said, int(np.argmax(said)), metrics)
    return gold, outcomes


def _generated(task: Any, by_head: dict[str, list[Any]]) -> tuple[str, dict[str, ItemOutcome]]:
    """Return the expected answer, and every head's outcome by metrics that are means."""
    higher_is_better = task.higher_is_better()
    means = [
        metric
        for metric, aggregated in task.aggregation().items()
        if getattr(aggregated, "__name__", "") == "mean" and higher_is_better.get(metric, True)
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
