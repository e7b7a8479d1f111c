"""The benchmarks of a config, opened where it names some: lm-eval is an extra, and takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scale_cli.config.schema import RunConfig
from scale_cli.extras import require

if TYPE_CHECKING:
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks


def open_benchmarks_of(config: RunConfig) -> OpenedBenchmarks | None:
    """Open every benchmark of a config; None where it names none."""
    if not config.evaluation.benchmarks:
        return None
    require("lm_eval", "evaluation.benchmarks")
    from scale_cli.evaluation.benchmark_tasks import open_benchmarks
    from scale_cli.evaluation.benchmarks import OpenedBenchmarks

    return OpenedBenchmarks(*open_benchmarks(config.evaluation.benchmarks))
