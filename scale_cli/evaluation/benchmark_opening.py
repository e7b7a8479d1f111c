"""The benchmarks of a config, opened where it names some: lm-eval is an extra, and takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scale_cli.config.schema import EvaluationConfig
from scale_cli.extras import require

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks


def open_benchmarks_of(evaluation: EvaluationConfig) -> OpenedBenchmarks | None:
    """Open every benchmark that a config names; None where it names none."""
    if not evaluation.benchmarks:
        return None
    require("lm_eval", "evaluation.benchmarks")
    from scale_cli.evaluation.benchmark_tasks import open_benchmarks
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks

    return OpenedBenchmarks(*open_benchmarks(evaluation.benchmarks))
