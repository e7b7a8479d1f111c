"""Measure training cost: every method in one process, in turns, on one random Llama; compare figures with their bars.

    python -m scripts.benchmark [--shape cpu|cpu-fp32|gpu|tiny] [--rounds N] [--methods NAME,...] [--output FOLDER]

Shapes, methods and bars are explained in docs/performance.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from scale_cli.storage.atomic import write_json
from scripts.benchmark.cases import SEED, cases
from scripts.benchmark.counting import head_peak_bytes
from scripts.benchmark.measuring import Measured, measure_counts, take_rounds
from scripts.benchmark.report import all_bars, bar_table, table, to_json
from scripts.benchmark.shapes import SHAPES, Shape


def run_benchmark(
    shape: Shape, names: list[str], num_rounds: int, output: Path, log: Callable[[str], None]
) -> dict[str, Measured]:
    """Measure the named methods (all of `cases` by default), print the tables and write OUTPUT/SHAPE.json."""
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
    log(
        "\n"
        + table(shape, results)
        + "\n\n"
        + bar_table(bars)
        + f"\n\nwritten {output / shape.name}.json"
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m scripts.benchmark", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--methods", default="", help="comma-separated names, all where none is given"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"))
    given = parser.parse_args()
    names = [name.strip() for name in given.methods.split(",") if name.strip()]
    run_benchmark(
        SHAPES[given.shape], names, given.rounds, given.output, lambda line: print(line, flush=True)
    )


if __name__ == "__main__":
    main()
