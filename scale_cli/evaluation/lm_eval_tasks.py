"""lm-eval's tasks that a config names, and tasks in files of a user's own.

A task's file may name Python and code on the hub. So it is read only if the user trusts it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import ConfigError, CorpusError, RunError, one_line

# Otherwise lm-eval would download the Python of metrics that are not its own, and run it.
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured."""

    source: BenchmarkSource  # its entry in the config
    tasks: dict[str, Any]  # lm-eval's tasks by name; several if the name is a group's
    is_generated: bool  # else multiple choice

    @property
    def num_items(self) -> int:
        limit = self.source.limit or sys.maxsize
        return sum(min(limit, len(task.eval_docs)) for task in self.tasks.values())


def open_benchmark(source: BenchmarkSource, *, trust_tasks: bool) -> Benchmark:
    """Open the tasks of one entry of the config.

    A group's items are pooled, as lm-eval weights its tasks by size.

    Raises:
        ConfigError: there is a mistake in the config or in a user's file, or that is not trusted.
        RunError: lm-eval cannot open the tasks, or we cannot measure them.
    """
    if source.path is None:
        tasks = _named_tasks(source.name)
    else:
        tasks = _own_tasks(source.name, source.path, trust_tasks=trust_tasks)
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
                raise RunError(
                    f"{name} is not one of lm-eval's own metrics, and scale fetches no code from the hub"
                )
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


def _own_tasks(name: str, path: str, *, trust_tasks: bool) -> dict[str, Any]:
    """Return the task, or the group of tasks, that a user wrote."""
    if not Path(path).is_file():
        raise CorpusError(f"{name}: no such file: {path}")
    if not trust_tasks:
        raise ConfigError(
            f"evaluation.benchmarks: {name}: {path} may run code; if you trust it, give --trust-tasks"
        )
    try:
        beside = TaskManager(include_path=str(Path(path).parent), include_defaults=False)
        tasks: dict[str, Any] = beside.load([path])["tasks"]
    except Exception as error:  # from lm-eval, datasets, a template or the user's code
        raise ConfigError(f"{path}: {one_line(error)}") from None
    return tasks
