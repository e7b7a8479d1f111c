"""lm-eval's benchmarks under every head: one pass answers for all, and lm-eval marks each.

A request is a context and a continuation. Both pass the model once, which gives the scores of every
head and of both routing rules. The router reads the context, as it does when the model is served.

Every head is asked as lm-eval's `hf` model asks the folder that serves it. The base's head is the
plain base with its own tokenizer. For every other head it is the export's tokenizer, which has the
run's new tokens, and puts the boundary before a text that stood before a document in training.
Where the two give the same ids, the base's head answers with the others; else the base alone reads
its own.

lm-eval's own loop, `lm_eval.evaluate`, asks and marks head by head, over answers that are computed
once; what it aggregates is resampled here instead.

Shapes: B requests of a batch, T positions.
"""

from __future__ import annotations

import copy
import io
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.data.encoding import DocumentMarkers, prompt_ids
from scale_cli.errors import RunError, one_line
from scale_cli.evaluation.intervals import Values, finite
from scale_cli.evaluation.lm_eval_tasks import Benchmark, open_benchmark
from scale_cli.evaluation.results import HEADS_AND_RULES, BenchmarkItems, SkippedBenchmark
from scale_cli.evaluation.scoring import Passes, observe, routed_rows
from scale_cli.methods.widened import RouterConfig
from scale_cli.model.heads import Streams, base_alone
from scale_cli.model.two_streams import Router, TwoStreams
from scale_cli.processes import Share, gathered, lowered_dtype
from scale_cli.terminal import progress_bar
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scale_cli.values import counted

# lm-eval's own seed for few-shot examples, and for tasks that sample their answers.
_SEED = 1234
# A context and a continuation, as text and as token ids, as lm-eval passes them.
EncodedRequest = tuple[tuple[str, str], list[int], list[int]]
logging.getLogger("lm_eval").setLevel(logging.CRITICAL)  # the report says what matters


class HeadsLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """An lm-eval model that scores requests for all its heads at once, and answers with one."""

    head: str  # which answers; it may be changed between two evaluations

    def __init__(
        self,
        model: Streams,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        *,
        router: RouterConfig,  # settings of both rules, whatever the model serves
        passes: Passes,
        max_length: int,  # tokens that the model reads at once
        share: Share,  # of the batches; each process returns all answers
    ) -> None:
        super().__init__(
            TwoStreams(model, Router.of_settings(router)),
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval adds a token for padding
            max_length=max_length,
            batch_size=passes.batch_size,
            mixed_precision_dtype=lowered_dtype(passes.mixed_precision),
        )
        self.head = model.heads[0]
        self.bar = progress_bar(total=0, disable=True)  # of tokens that are scored, or of answers
        self._observe = partial(observe, model, passes=passes, share=share)
        self._route = partial(routed_rows, router=router, heads=model.heads)
        self._share = share
        # By context and continuation: a log-likelihood of each head and rule.
        self._known: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the head's log-likelihoods of continuations; `is_greedy` is False."""
        unseen = {request.args: request for request in requests if request.args not in self._known}
        if unseen:
            super().loglikelihood(list(unseen.values()), disable_tqdm=True)
        return [(self._known[request.args][self.head], False) for request in requests]

    def _loglikelihood_tokens(self, requests: list[EncodedRequest], **_: Any) -> None:
        """Score requests by every head and rule, and keep the scores."""
        rows = []
        for (context, continuation), context_ids, continuation_ids in requests:
            if not context_ids or not 0 < len(continuation_ids) <= self.max_length:
                raise RunError(
                    f"{continuation!r} after {context[-40:]!r} has {counted(len(continuation_ids), 'token')} "
                    f"after {len(context_ids)}, but lm-eval can score only 1 to {self.max_length} "
                    "after 1 or more"
                )
            # What is too long loses its beginning, as in lm-eval.
            rows.append(torch.tensor((context_ids + continuation_ids)[-self.max_length - 1 :]))
        self.bar.total += sum(len(row) - 1 for row in rows)

        observed = self._observe(rows, bar=self.bar)
        for batch in self._route(observed):
            for row, place in enumerate(batch.places):
                args, _context_ids, continuation_ids = requests[place]
                end = observed[place].shape[1]
                scored = slice(end - len(continuation_ids), end)
                for head, log_probs_BT in batch.log_probs.items():
                    self._known[args][head] = float(log_probs_BT[row, scored].sum())

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Return the head's answers; batches are cut as in lm-eval, before processes share them."""
        self.model.head = self.head
        contexts = [request.args[0] for request in requests]
        in_order = sorted(
            range(len(requests)), key=lambda at: (-len(self.tok_encode(contexts[at])), contexts[at])
        )
        self.bar.total += len(requests)
        mine: dict[int, str] = {}
        batches = range(0, len(requests), self.batch_size)
        for first in batches[self._share.index :: self._share.num_processes]:
            batch = in_order[first : first + self.batch_size]
            torch.manual_seed(_SEED)
            texts = super().generate_until([requests[at] for at in batch], disable_tqdm=True)
            mine.update(zip(batch, texts, strict=True))
            self.bar.update(self._share.num_processes * len(batch))
        answers = {at: text for some in gathered(mine, self._share) for at, text in some.items()}
        return [answers[at] for at in range(len(requests))]


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


def heads_of(
    model: Streams,  # in evaluation mode
    tokenizer: PreTrainedTokenizerBase,  # the run's own, which begins a text as the base's does
    of_base: PreTrainedTokenizerBase | None = None,  # the base's, if the run has new tokens
    **options: Any,  # of HeadsLM
) -> dict[str, HeadsLM]:
    """Return the lm-eval model that answers with each head: one for all, or one for the base."""
    exported = framed(tokenizer)
    answering = dict.fromkeys(HEADS_AND_RULES, HeadsLM(model, exported, **options))
    if of_base is not None or exported is not tokenizer:
        answering["base"] = HeadsLM(base_alone(model), of_base or tokenizer, **options)
    return answering


@dataclass(frozen=True)
class OpenedBenchmarks:
    """The benchmarks of a config, opened."""

    ready: list[Benchmark]  # what can be measured
    skipped: list[SkippedBenchmark]  # what cannot, and why

    @property
    def num_items(self) -> int:
        return sum(benchmark.num_items for benchmark in self.ready)

    def measure(
        self,
        model: Streams,  # in evaluation mode
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        share: Share,
    ) -> tuple[list[BenchmarkItems], list[SkippedBenchmark]]:
        """Return each benchmark's items under every head, and what could not be measured."""
        has_new_tokens = config.method.vocabulary is not None
        answering = heads_of(
            model,
            tokenizer,
            load_tokenizer(config.model) if has_new_tokens else None,
            router=config.method.rules,
            passes=Passes.of(config, model.config.max_position_embeddings),
            max_length=resolve_max_length(model.config, tokenizer),
            share=share,
        )
        measured = []
        skipped = list(self.skipped)
        for benchmark in self.ready:
            try:
                measured.append(measure_items(benchmark, answering))
            except RunError as error:
                skipped.append(SkippedBenchmark(benchmark.source.name, str(error)))
        return measured, skipped


def open_benchmarks(sources: list[BenchmarkSource], *, trust_tasks: bool) -> OpenedBenchmarks:
    """Open the benchmarks, and list those that cannot be measured.

    Raises ConfigError for a mistake in the config, and for a task's file that is not trusted.
    """
    opened = OpenedBenchmarks([], [])
    # The bar keeps the terminal's stderr. lm-eval and datasets get none: they draw many bars.
    bar = progress_bar(iterable=sources, desc="opening benchmarks", unit=" benchmarks", leave=False)
    with redirect_stderr(io.StringIO()):
        for source in bar:
            try:
                opened.ready.append(open_benchmark(source, trust_tasks=trust_tasks))
            except RunError as error:
                opened.skipped.append(SkippedBenchmark(source.name, str(error)))
    return opened


def measure_items(benchmark: Benchmark, answering: Mapping[str, HeadsLM]) -> BenchmarkItems:
    """Return a benchmark's items, marked under every head.

    Raises:
        RunError: lm-eval cannot score a request, or says of no item whether it is right.
    """
    bar = progress_bar(
        total=0,
        desc=f"evaluating {benchmark.source.name}",
        unit=" answers" if benchmark.is_generated else " tokens",
        unit_scale=not benchmark.is_generated,
        leave=False,
    )
    items: dict[tuple[str, int], dict[str, Any]] = {}  # by task and document
    f1 = []  # by head and task
    with bar, redirect_stderr(io.StringIO()):
        for head, lm in answering.items():
            lm.head = head
            lm.bar = bar
            told = _evaluated(lm, benchmark)
            for name, task in benchmark.tasks.items():
                f1.append(told["results"][name].get("f1,none"))
                marked = defaultdict(list)  # by document: the marks by every filter
                for sample in told["samples"][name]:
                    marked[sample["doc_id"]].append(sample)
                for doc_id, samples in marked.items():
                    target = samples[0]["target"]
                    new = {"subtask": name, "doc_id": doc_id, "target": target, "heads": {}}
                    item = items.setdefault((name, doc_id), new)
                    item["heads"][head] = _outcome(task, samples)

    has_f1 = not (benchmark.is_generated or len(benchmark.tasks) > 1 or None in f1)
    measured = BenchmarkItems(
        benchmark.source,
        list(items.values()),
        _scores_of(list(items.values())),
        np.array(f1) if has_f1 else None,
    )
    _ = measured.judged_by  # raises if there is none
    return measured


def _evaluated(lm: HeadsLM, benchmark: Benchmark) -> Any:
    """Return what lm-eval says of one head: results and samples by task. RunError if it fails."""
    for task in benchmark.tasks.values():
        task.set_fewshot_seed(_SEED)
    try:
        return evaluate(
            lm, {"tasks": benchmark.tasks}, limit=benchmark.source.limit, bootstrap_iters=0
        )
    except (
        AssertionError,  # lm-eval's own, of answers that are longer than the model reads
        ImportError,  # a metric's library
        LookupError,  # this and the others: of an item that its task does not fit
        SyntaxError,
        TemplateError,
        TypeError,
        ValueError,
    ) as error:
        raise RunError(one_line(error)) from None


def _scores_of(items: list[dict[str, Any]]) -> dict[str, Values]:
    """Return the marks (items, heads) by each metric that every item of the base has."""
    of_base = [item["heads"]["base"]["metrics"] for item in items]
    return {
        name: np.array(
            [[head["metrics"][name] for head in item["heads"].values()] for item in items], float
        )
        for name in of_base[0]
        if all(name in metrics for metrics in of_base)
    }


def _outcome(task: Any, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a head said of an item, and lm-eval's marks; a figure not finite is None.

    `samples` are what lm-eval says of it, one by each filter that made the answers.
    """
    first = samples[0]
    outcome: dict[str, Any] = {}
    if task.OUTPUT_TYPE == "multiple_choice":
        num_choices = len(task.doc_to_choice(first["doc"]))
        said = [answer[0] for answer in first["filtered_resps"][:num_choices]]
        outcome["log_likelihoods"] = [finite(of_choice) for of_choice in said]  # in nats
        outcome["prediction"] = int(np.argmax(said))
        # No others: `exact_match` would need to know whether a choice is the likeliest text.
        means = ["acc", "acc_norm"]
    else:
        outcome["prediction"] = str(first["resps"][0][0])
        higher_is_better = task.higher_is_better()
        means = [
            metric
            for metric, aggregated in task.aggregation().items()
            if getattr(aggregated, "__name__", "") == "mean" and higher_is_better.get(metric, True)
        ]
    outcome["metrics"] = {
        metric if len(samples) == 1 else f"{metric}, {sample['filter']}": finite(sample[metric])
        for sample in samples
        for metric in means
        if isinstance(sample.get(metric), int | float | np.number)
    }
    return outcome
