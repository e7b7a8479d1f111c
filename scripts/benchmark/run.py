"""The whole benchmark: build, count, time in rounds, report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from scale_cli.storage.atomic import write_json
from scripts.benchmark.bars import all_bars
from scripts.benchmark.cases import SEED, cases
from scripts.benchmark.head_memory import head_peak_bytes
from scripts.benchmark.measuring import Measured, measure_counts, take_rounds
from scripts.benchmark.report import bar_table, table, to_json
from scripts.benchmark.shapes import Shape


def run_benchmark(
    shape: Shape, names: list[str], num_rounds: int, output: Path, log: Callable[[str], None]
) -> dict[str, Measured]:
    """Measure methods (of `cases`; all where no names are given), print the tables and write OUTPUT/SHAPE.json."""
    with tempfile.TemporaryDirectory() as scratch:
        batches = shape.batches(Path(scratch), SEED)
        makers = cases(shape, batches, Path(scratch))
        chosen, results = [], {}
        for name in names or makers:
            log(f"preparing {name}")
            chosen.append(makers[name]())
            results[name] = measure_counts(chosen[-1], shape, batches)
        take_rounds(chosen, list(results.values()), shape, num_rounds, log)
        bars = all_bars(shape, results, head_peak_bytes(shape.device))
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"{shape.name}.json", to_json(shape, results, bars))
    log("\n" + table(shape, results) + "\n\n" + bar_table(bars) + f"\n\nwritten {output / shape.name}.json")
    return results
