"""What training costs: every method in one process, in turns, on one random Llama; figures against their bars.

    python -m scripts.benchmark [--shape cpu|cpu-fp32|gpu|tiny] [--rounds N] [--methods NAME,...] [--output FOLDER]

Shapes, methods and bars are explained in docs/performance.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.benchmark.run import run_benchmark
from scripts.benchmark.shapes import SHAPES


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser("python -m scripts.benchmark", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--methods", default="", help="comma-separated names, all where none is given")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"))
    given = parser.parse_args()
    names = [name.strip() for name in given.methods.split(",") if name.strip()]
    run_benchmark(SHAPES[given.shape], names, given.rounds, given.output, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
