"""The benchmarks of a config, opened where it names some: lm-eval is an extra, and takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scale_cli.config.schema import EvaluationConfig
from scale_cli.config.sources import BenchmarkSource
from scale_cli.errors import CorpusError
from scale_cli.extras import require

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks


def check_task_file(source: BenchmarkSource) -> None:
    """Find out whether the task's file is there, where the config names one."""
    if source.path is not None and not Path(source.path).is_file():
        raise CorpusError(f"{source.name}: no such file: {source.path}")


def open_benchmarks_of(evaluation: EvaluationConfig) -> OpenedBenchmarks | None:
    """Open every benchmark that a config names; None where it names none."""
    if not evaluation.benchmarks:
        return None
    require("lm_eval", "evaluation.benchmarks")
    from scale_cli.evaluation.benchmark_tasks import open_benchmarks
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks

    return OpenedBenchmarks(*open_benchmarks(evaluation.benchmarks))
