"""Many short runs side by side on one device: `python -m scripts.gpu.learning JOBS OUTPUT [--workers N] [--budget S]`.

JOBS has a line of JSON for each: {"name": ..., "config": FILE, "verbs": ["upscale", "train"], "overrides": ["seed=1"]}.
Each worker takes the next line when it has done one, so the first lines are the most important. OUTPUT/results.jsonl
gets a line for each that ends, with its metrics and its report; OUTPUT/logs what it said.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for all jobs")
    given = parser.parse_args()

    jobs = [json.loads(line) for line in given.jobs.read_text().splitlines() if line.strip()]
    (given.output / "logs").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    taken = spawn.Value("i", 0)
    workers = [
        spawn.Process(target=work, args=(jobs, taken, given.output))
        for _ in range(min(given.workers, len(jobs)))
    ]
    for worker in workers:
        worker.start()
    deadline_s = time.monotonic() + given.budget
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))
    for worker in workers:
        worker.kill()

    results = given.output / "results.jsonl"
    done = results.read_text().splitlines() if results.is_file() else []
    print(f"{len(done)} of {len(jobs)} jobs ended: {results}")


def work(jobs: Sequence[Mapping[str, Any]], taken: Any, output: Path) -> None:
    """Do the next job until none is left."""
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(jobs):
            return
        job = jobs[number]
        started_s = time.monotonic()
        with (
            (output / "logs" / f"{job['name']}.log").open("w") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            try:
                found = do(job, output)
            except BaseException as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
        elapsed_s = round(time.monotonic() - started_s, 1)
        line = json.dumps({"name": job["name"], "elapsed_s": elapsed_s, **found}) + "\n"
        with taken.get_lock(), (output / "results.jsonl").open("a") as results:
            results.write(line)


def do(job: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Run the verbs of a job; return their exit codes, and what the run's log and report say."""
    import torch

    from scripts.gpu.verbs import run_verb

    torch.set_num_threads(1)
    config = Path(job["config"])
    run = output / "runs" / job["name"]
    overrides = [f"output_dir={run}", *job.get("overrides", [])]
    found: dict[str, Any] = {"overrides": job.get("overrides", []), "exit_codes": []}
    for verb in job["verbs"]:
        started_s = time.monotonic()
        exit_code = run_verb(verb, config, overrides)
        found[f"{verb}_s"] = round(time.monotonic() - started_s, 1)
        found["exit_codes"].append(exit_code)
        if exit_code not in (0, 3):  # 3: measured, and worse than the base
            break

    if (metrics := run / "metrics.jsonl").is_file():
        found["metrics"] = [json.loads(line) for line in metrics.read_text().splitlines()]
    if (report := run / "evaluation" / "report.json").is_file():
        found["report"] = json.loads(report.read_text())
    shutil.rmtree(run, ignore_errors=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
