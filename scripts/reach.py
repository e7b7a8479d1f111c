"""`make reach`: run every verb on a random Llama of Llama-3.2-1B's shape; compare peak memory with the plan's.

    python -m scripts.reach [FOLDER] [--layers 16] [--hidden 2048] [--vocabulary 128256] [--steps 3]

The config is configs/llama-3.2-1b-korean.yaml; `shrink` has all differences. Training is killed after its first
checkpoint and resumed. Then transformers alone loads the export, plainly and routed. A CPU without bfloat16 computes in
float32 and holds the base in it, since a bfloat16 step takes minutes there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scale_cli.export.records import ExportRecord
from scale_cli.processes import cpu_precision

CONFIG = Path(__file__).parent.parent / "configs" / "llama-3.2-1b-korean.yaml"
LENGTH, DOCUMENTS = 512, 4
MOST_GIB = {"bf16": 12.0, "no": 24.0}  # for weights of two bytes, or four
_GIB = 2**30
# Both ways to load the export, with no code of ours but the folder's own.
_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, routed = sys.argv[1], sys.argv[2] == "routed"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=routed)
ids = tokenizer("Where was", return_tensors="pt").input_ids
said = model.generate(ids, max_new_tokens=4, do_sample=False)
assert said.shape[1] == ids.shape[1] + 4
print(type(model).__name__)
"""


@dataclass(frozen=True)
class Cost:
    """The time and memory that one process took."""

    cpu_s: float
    elapsed_s: float
    peak_bytes: int


def shrink(config: dict[str, Any], folder: Path, steps: int, precision: str) -> dict[str, Any]:
    """Return the reference config with a local base and text, and as few steps and tokens as still test every verb."""
    dtype = "bfloat16" if precision == "bf16" else "float32"
    sources = [
        {
            "name": "korean",
            "path": f"{folder}/text/korean-train.txt",
            "language": "ko",
            "weight": 0.9,
        },
        {
            "name": "english",
            "path": f"{folder}/text/english-train.txt",
            "language": "en",
            "weight": 0.1,
            "role": "replay",
        },
    ]
    roles = {"english": ("en", "retention"), "korean": ("ko", "acquisition")}
    held_out = [
        {
            "name": name,
            "path": f"{folder}/text/{name}-valid.txt",
            "language": language,
            "role": role,
            "max_documents": DOCUMENTS,
        }
        for name, (language, role) in roles.items()
    ]
    few = {
        "max_steps": steps,
        "global_batch_size": 1,
        "micro_batch_size": 1,
        "warmup_steps": 1,
        "save_every_steps": 1,
    }
    return {
        **config,
        "output_dir": f"{folder}/run",
        "model": {**config["model"], "base": f"{folder}/base", "dtype": dtype},
        "corpus": {**config["corpus"], "sequence_length": LENGTH, "sources": sources},
        "train": {**config["train"], **few, "log_every_steps": 1, "mixed_precision": precision},
        "evaluation": {
            **config["evaluation"],
            "perplexity": held_out,
            "benchmarks": [],
            "mixed_precision": precision,
        },
    }


def run(command: list[str], *, kill_when: Path | None = None) -> Cost:
    """Run a process to its end, or kill it once a file exists; return its cost."""
    began = time.monotonic()
    process = subprocess.Popen(command)
    if kill_when is not None:
        while (
            not kill_when.exists()
            and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)  # Popen.kill would reap a process that has ended
    _, status, used = os.wait4(process.pid, 0)
    if (code := os.waitstatus_to_exitcode(status)) != (0 if kill_when is None else -signal.SIGKILL):
        raise SystemExit(f"{' '.join(command[1:4])} ended with {code}")
    return Cost(used.ru_utime + used.ru_stime, time.monotonic() - began, used.ru_maxrss * 1024)


def take_through_verbs(folder: Path) -> dict[str, Cost]:
    """Run every verb, each in its own process, and load the export in both ways."""
    config, export = folder / "run.yaml", folder / "run" / "export" / "plain-bfloat16"

    def verb(name: str, *options: str, kill_when: Path | None = None) -> Cost:
        return run(
            [sys.executable, "-m", "scale_cli", name, str(config), *options], kill_when=kill_when
        )

    return {
        "plan": verb("plan"),
        "upscale": verb("upscale"),
        "train, killed after step 1": verb(
            "train", kill_when=folder / "run" / "checkpoints" / "step-00000001" / "manifest.json"
        ),
        "train, resumed": verb("train", "--resume", "auto"),
        "evaluate": verb("evaluate"),
        "export": verb("export"),
        **{
            f"load {way}": run([sys.executable, "-c", _LOAD, str(export), way])
            for way in ("plainly", "routed")
        },
    }


def least_bytes(folder: Path, precision: str) -> dict[str, int]:
    """Return the least bytes that each verb must hold: stored models, or in training the plan's memory.

    Training also holds the copy of a checkpoint while it is written.
    """
    told = subprocess.run(
        [sys.executable, "-m", "scale_cli", "plan", "--json", str(folder / "run.yaml")],
        capture_output=True,
        text=True,
        check=True,
    )
    method = json.loads(told.stdout)["methods"][0]
    memory, frozen_bytes = method["memory"], 2 if precision == "bf16" else 4
    model = frozen_bytes * method["num_frozen"] + 4 * method["num_trainable"]
    written = sum(
        file.stat().st_size for file in (folder / "run" / "export").rglob("*.safetensors")
    )
    train = sum(memory.values()) + memory["trainable"] + memory["moments"]
    return {
        "upscale": model,
        "train, killed after step 1": train,
        "train, resumed": train,
        "evaluate": model,
        "export": model + written,
        "load plainly": written,
        "load routed": written,
    }


def main() -> None:
    """Write base, text and config, run the verbs, and print the table; exit with 1 above MOST_GIB."""
    parser = argparse.ArgumentParser(
        "python -m scripts.reach", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/reach"))
    for size, default in (("layers", 16), ("hidden", 2048), ("vocabulary", 128_256)):
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    folder: Path = given.folder
    shutil.rmtree(folder, ignore_errors=True)
    shape = [f"--{size}={getattr(given, size)}" for size in ("layers", "hidden", "vocabulary")]
    run([sys.executable, "-m", "scripts.random_base", str(folder), *shape])
    precision = cpu_precision()
    config = shrink(yaml.safe_load(CONFIG.read_text()), folder, given.steps, precision)
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    costs, least = take_through_verbs(folder), least_bytes(folder, precision)
    print("\n| verb | CPU s | elapsed s | peak GiB | least GiB |\n|---|---:|---:|---:|---:|")
    for name, cost in costs.items():
        bound = f"{least[name] / _GIB:.2f}" if name in least else ""
        print(
            f"| {name} | {cost.cpu_s:.0f} | {cost.elapsed_s:.0f} | {cost.peak_bytes / _GIB:.2f} | {bound} |"
        )
    parity = ExportRecord.load(folder / "run" / "export" / "plain-bfloat16")
    assert parity.routed is not None, "of `route`"
    for way, figures in (("plainly", parity), ("routed", parity.routed)):
        print(
            f"the export, {way}: {figures.nats:.2g} nats from the trained model's predictions; {figures}"
        )
    print(
        f"in all {sum(cost.elapsed_s for cost in costs.values()) / 60:.0f} minutes; everything is in {folder}"
    )
    if max(cost.peak_bytes for cost in costs.values()) > MOST_GIB[precision] * _GIB:
        raise SystemExit(f"more than {MOST_GIB[precision]:g} GiB")


if __name__ == "__main__":
    main()
