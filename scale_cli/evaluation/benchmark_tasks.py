"""From the benchmarks that a config names to lm-eval's task objects, or to the reason why there is none."""

from __future__ import annotations

import difflib
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import huggingface_hub
import lm_eval.utils
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks.kobest.utils import macro_f1_score

from scale_cli.config.safe_yaml import parse, read_text
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, one_line
from scale_cli.evaluation.benchmark_opening import check_task_file
from scale_cli.evaluation.results import SkippedBenchmark
from scale_cli.progress import progress_bar

_PROBE_TIMEOUT_S = 5.0
_FORMS = ("arrow", "csv", "json", "parquet", "text")  # of local files; datasets knows others, pickles among them
# lm-eval's own choice wherever few-shot examples are drawn.
_FEWSHOT_SEED = 1234
# A template is data: it is rendered where it reaches nothing but the item.
_sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_sandbox.filters.update(lm_eval.utils.env.filters)
lm_eval.utils.env = _sandbox


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured."""

    name: str  # in the report
    source: BenchmarkSource  # the config's item that it comes from
    tasks: dict[str, Any]  # lm-eval's tasks by name; several where the name is that of a group

    @property
    def generates(self) -> bool:
        """Whether its answers are generated; else they are chosen."""
        return next(iter(self.tasks.values())).OUTPUT_TYPE == "generate_until"

    @property
    def reports_macro_f1(self) -> bool:
        """Whether lm-eval reports macro-F1 of its tasks, as it does of KoBEST's."""
        return not self.generates and any(_reports_macro_f1(task) for task in self.tasks.values())

    def seed_examples(self) -> None:
        """Make lm-eval draw, for the requests that it builds next, the few-shot examples that it drew before."""
        for task in self.tasks.values():
            task.set_fewshot_seed(_FEWSHOT_SEED)


def open_benchmarks(sources: list[BenchmarkSource]) -> tuple[list[Benchmark], list[SkippedBenchmark]]:
    """Return the benchmarks that can be measured, and those that cannot, where that is not the config's mistake."""
    benchmarks: list[Benchmark] = []
    skipped: list[SkippedBenchmark] = []
    for source in sources:
        check_task_file(source)
    # The bar keeps the terminal's stderr; lm-eval and datasets, which draw a bar for every task, get none.
    bar = progress_bar(iterable=sources, desc="opening benchmarks", unit=" benchmarks", leave=False)
    with quiet_lm_eval(), _hub_code_refused():
        for source in bar:
            opened = _open_named(source) if source.path is None else _open_file(source)
            if isinstance(opened, SkippedBenchmark):
                skipped.append(opened)
            else:
                benchmarks.extend(opened)
    names = [benchmark.name for benchmark in benchmarks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"evaluation.benchmarks: {twice[0]} is named twice, once within a group")
    return benchmarks, skipped


def _open_file(source: BenchmarkSource) -> list[Benchmark]:
    """Open a task that the user has written for lm-eval; its data are local files, and no code is run for it."""
    assert source.path is not None
    config = parse(read_text(Path(source.path)), source.path)
    if not isinstance(config, dict) or {"group", "include"} & config.keys():
        raise ConfigError(f"{source.path}: not a task of lm-eval that stands by itself")
    form = config.get("dataset_path")
    if form not in _FORMS:
        raise ConfigError(f"{source.path}: dataset_path: local files are read, as one of {', '.join(_FORMS)}")

    def load(**kwargs: Any) -> Any:
        with TemporaryDirectory() as cache:  # nothing of it stays
            return datasets.load_dataset(form, **kwargs, cache_dir=cache, keep_in_memory=True)

    try:
        for metric in config.get("metric_list") or []:
            if metric.get("aggregation") == "macro_f1":  # which lm-eval's YAML says by naming a function
                metric["aggregation"] = macro_f1_score
        task = ConfigurableTask(config=config | {"task": source.name, "custom_dataset": load})
    except Exception as error:  # of lm-eval, of datasets, of a template
        raise ConfigError(f"{source.path}: {one_line(error)}") from None
    _set_fewshot(task, source)
    return [Benchmark(source.name, source, {source.name: task})]


def _open_named(source: BenchmarkSource) -> list[Benchmark] | SkippedBenchmark:
    manager = _all_tasks()
    if source.name not in manager.task_index:
        close = difflib.get_close_matches(source.name, manager.all_tasks, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"evaluation.benchmarks: lm-eval has no task {source.name!r}{hint}")
    try:
        with _as_offline_as_the_hub() as is_online:
            tasks: dict[str, Any] = manager.load([source.name])["tasks"]
    except Exception as error:  # a task is YAML, Python and a download: it may fail in any way, and the rest still run
        offline = "" if is_online else "its data is not here, and the hub cannot be reached "
        return SkippedBenchmark(source.name, f"{offline}({one_line(error)})")
    if (reason := _not_measured(tasks)) is not None:
        return SkippedBenchmark(source.name, reason)
    for task in tasks.values():
        _set_fewshot(task, source)
    # Items of a group's tasks are pooled, as lm-eval weighs them by size; the F1 of different classes cannot be.
    if any(_reports_macro_f1(task) for task in tasks.values()):
        return [Benchmark(name, source, {name: task}) for name, task in tasks.items()]
    return [Benchmark(source.name, source, tasks)]


def _not_measured(tasks: dict[str, Any]) -> str | None:
    """Return why tasks cannot be measured; None where they can."""
    kinds = sorted({str(task.OUTPUT_TYPE) for task in tasks.values()})
    if kinds not in (["multiple_choice"], ["generate_until"]):
        return f"only multiple choice and generate_until are measured, one at a time, and this is {', '.join(kinds)}"
    if any(getattr(task, "UNSAFE_CODE", False) for task in tasks.values()):
        return "it runs code that the model has written"
    if kinds == ["generate_until"]:
        metrics = {
            name: metric for task in tasks.values() for name, metric in getattr(task, "_metric_fn_list", {}).items()
        }
        if lacking := sorted(name for name, metric in metrics.items() if metric is None):
            return f"{lacking[0]} is no metric of lm-eval's own, and no code is fetched from the hub"
    return None


def _set_fewshot(task: Any, source: BenchmarkSource) -> None:
    # As lm-eval itself does: a task that says 0 stays at 0.
    if source.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config("num_fewshot", source.num_fewshot)
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)


def _reports_macro_f1(task: Any) -> bool:
    return getattr(task.aggregation().get("f1"), "__name__", None) == "macro_f1_score"


@cache
def _all_tasks() -> Any:
    return TaskManager()  # reads 14,000 files: seconds, so only for a task by name, and once


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep lm-eval's log and progress bars to itself: what matters of them is said in the report."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _hub_code_refused() -> Iterator[None]:
    """Hide the package `evaluate`, by which lm-eval would download a metric's Python and run it.

    Of a multiple-choice task it never calls such a metric: it aggregates the predictions itself.
    """
    missing = object()
    before = sys.modules.get("evaluate", missing)
    sys.modules["evaluate"] = None  # type: ignore[assignment]  # Python's own way to make an import fail
    try:
        yield
    finally:
        if before is missing:
            del sys.modules["evaluate"]
        else:
            sys.modules["evaluate"] = before  # type: ignore[assignment]


@contextmanager
def _as_offline_as_the_hub() -> Iterator[bool]:
    """Yield whether the hub answers; where it does not, libraries look into their caches and retry nothing."""
    if _hub_answers():
        yield True
        return
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@cache
def _hub_answers() -> bool:
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PROBE_TIMEOUT_S)
    except Exception:  # of whichever HTTP library the installed hub client uses
        return False
    return True
