"""Verbs of one run on the random base, in one process, with their time and peak memory as JSON.

python -m scripts.gpu.verbs FOLDER VERB[,VERB] [--run NAME] [--small] [--resume] [--warn-of-waits] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch
import yaml

from scale_cli.cli import main as scale
from scale_cli.storage.atomic import write_json, write_text


def write_config(folder: Path, small: bool) -> Path:
    """Write FOLDER/run.yaml: a few steps of Preserve on the base and the text in FOLDER."""
    num_steps = 6 if small else 30
    text = folder / "text"
    config = {
        "output_dir": str(folder / "runs/train"),
        "model": {"base": str(folder / "base"), "dtype": "bfloat16"},
        "method": {"variant": "route", "expansion": {"ratio": 0.125}},
        "corpus": {
            "sequence_length": 128 if small else 2048,
            "sources": [
                {"name": "korean", "path": str(text / "korean-train.txt"), "language": "ko"}
            ],
        },
        "train": {
            "max_steps": num_steps,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "warmup_steps": 2,
            "log_every_steps": num_steps // 3,
            "mixed_precision": "bf16",
            "lr": 1e-4,
        },
        "evaluation": {
            "perplexity": [
                {
                    "name": language,
                    "path": str(text / f"{language}-valid.txt"),
                    "language": language[:2],
                    "role": role,
                    "max_documents": 20,
                }
                for language, role in (("english", "retention"), ("korean", "acquisition"))
            ]
        },
    }
    path = folder / "run.yaml"
    written = yaml.safe_dump(config, sort_keys=False)
    if not path.is_file() or path.read_text() != written:  # runs side by side read it
        write_text(path, written)
    return path


def run_verb(verb: str, config: Path, overrides: list[str]) -> int:
    """Run a verb as its command line does; return its exit code."""
    sys.argv = ["scale", verb, str(config), *overrides]
    try:
        scale()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("verbs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--run", default="train", help="the run's folder in FOLDER/runs")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--resume", action="store_true", help="train from the newest checkpoint")
    parser.add_argument("--warn-of-waits", action="store_true", help="name lines that wait")
    given = parser.parse_intermixed_args()

    on_gpu = torch.cuda.is_available()
    if given.warn_of_waits and on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    config = write_config(given.folder, given.small)
    run = given.folder / "runs" / given.run
    measured: dict[str, object] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }
    exit_code = 0
    for verb in given.verbs.split(","):
        started_s = time.monotonic()
        resume = ["--resume", "auto"] if given.resume and verb == "train" else []
        exit_code = run_verb(verb, config, [*resume, f"output_dir={run}", *given.overrides])
        measured[verb] = {"exit_code": exit_code, "elapsed_s": time.monotonic() - started_s}
        if exit_code:
            break

    measured["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    measured["peak_device_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else 0
    log = run / "metrics.jsonl"
    if log.is_file():
        keys = ("step", "tokens_per_s", "peak_memory_bytes", "data_wait_s", "loss")
        last = json.loads(log.read_text().splitlines()[-1])
        measured["last_record"] = {key: last[key] for key in keys if key in last}
    write_json(given.folder / f"{given.run}-{given.verbs.replace(',', '-')}.json", measured)
    print(json.dumps(measured, indent=1))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
