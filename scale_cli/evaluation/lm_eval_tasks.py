"""lm-eval's tasks that a config names, and tasks in files of a user's own.

A user's file is data: it runs no code. Its keys are listed, its templates run in a sandbox, its
data are local files, and its metrics are lm-eval's own.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import lm_eval.utils
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks.kobest.utils import macro_f1_score

from scale_cli.config.load import parse, read_text
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, CorpusError, RunError, one_line

_FOREIGN_METRIC = "{} is not one of lm-eval's own metrics, and scale fetches no code from the hub"
# Formats of local files; datasets has others, pickles among them.
_FORMS = ("arrow", "csv", "json", "parquet", "text")
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
# Templates of a user's file are untrusted: the sandbox gives them access to the item only.
_SANDBOX = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_SANDBOX.filters["regex_replace"] = lm_eval.utils.regex_replace
# Otherwise lm-eval would download the Python of metrics that are not its own, and run it.
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured."""

    source: BenchmarkSource  # its entry in the config
    tasks: dict[str, Any]  # lm-eval's tasks by name; several if the name is a group's
    is_generated: bool  # else multiple choice

    @property
    def reports_macro_f1(self) -> bool:
        """Whether it is one task for which lm-eval reports macro-F1, as for each of KoBEST's."""
        aggregations = [task.aggregation().get("f1") for task in self.tasks.values()]
        return not self.is_generated and aggregations == [macro_f1_score]

    @property
    def num_items(self) -> int:
        limit = self.source.limit or sys.maxsize
        return sum(min(limit, len(task.eval_docs)) for task in self.tasks.values())


def open_benchmark(source: BenchmarkSource) -> Benchmark:
    """Open the tasks of one entry of the config.

    A group's items are pooled, as lm-eval weights its tasks by size.

    Raises:
        ConfigError: there is a mistake in the config or in a user's file.
        RunError: lm-eval cannot open the tasks, or we cannot measure them.
    """
    tasks = _named_tasks(source.name) if source.path is None else _read_task(source)
    kinds = {task.OUTPUT_TYPE for task in tasks.values()}
    if kinds not in ({"multiple_choice"}, {"generate_until"}):
        raise RunError(
            "only multiple_choice and generate_until are measured, one kind per benchmark; "
            f"this is {', '.join(sorted(kinds))}"
        )
    is_generated = kinds == {"generate_until"}
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise RunError("it runs code that the model writes")
        for name, metric in getattr(task, "_metric_fn_list", {}).items():
            # lm-eval does not call this function for multiple choice.
            if metric is None and is_generated:
                raise RunError(_FOREIGN_METRIC.format(name))
        shown = task.get_config("num_fewshot")
        if shown != 0 and source.num_fewshot is not None:  # 0 stays 0, as in lm-eval
            shown = source.num_fewshot
        task.set_config("num_fewshot", shown or 0)
    return Benchmark(source, tasks, is_generated)


@cache
def _all_tasks() -> Any:
    """Return all of lm-eval's tasks: 14,000 files, which take seconds to read."""
    return TaskManager()


def _named_tasks(name: str) -> dict[str, Any]:
    """Return lm-eval's tasks of a name."""
    if name not in _all_tasks().task_index:
        raise ConfigError(f"evaluation.benchmarks: lm-eval has no task {name!r}")
    # A task may load a metric by its name, for which this folder's code would be taken.
    for script in sorted(Path().glob("*/*.py")):
        if script.stem == script.parent.name:
            raise RunError(
                f"lm-eval might run {script} of this folder as a metric; "
                "start scale in another folder"
            )
    try:
        tasks: dict[str, Any] = _all_tasks().load([name])["tasks"]
    except Exception as error:  # a task is YAML, Python and a download: it may fail in any way
        raise RunError(one_line(error)) from None
    return tasks


def _read_task(source: BenchmarkSource) -> dict[str, Any]:
    """Return a task that a user wrote."""
    path = str(source.path)
    if not Path(path).is_file():
        raise CorpusError(f"{source.name}: no such file: {path}")
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
        with TemporaryDirectory() as folder:  # removed afterwards
            return datasets.load_dataset(form, **kwargs, cache_dir=folder, keep_in_memory=True)

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
