"""Every method, tuned by as many runs as every other, then run with several seeds, and all of it in one table.

    python scripts/all_methods.py [CONFIG] [KEY.SUB=VALUE]...

CONFIG is configs/petitions.yaml where none is named. Each method is tuned (`scale sweep`) on documents of the first
training source that nothing is trained on meanwhile and that are not those reported, then run at as many tokens as the
config says, and at as much training work (`scale plan`) as those tokens are of Preserve. Everything lands in
output_dir: METHOD/tuning, METHOD/tokens-seed0, ..., table.md, comparison/. What is finished is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.evaluation.results import Report
from scale_cli.report.numbers import NOT_FINITE, number
from scale_cli.report.tables import Table
from scale_cli.storage.atomic import read_json, write_text
from scale_cli.upscale.base import load_base_config
from scripts.benchmark.algebra import ideal_flops_per_token

SEEDS, TUNING_SEED = (0, 1, 2), 3
HELD_BACK = 60
# The share of the steps that methods are tuned with: at full fine-tuning's, as many as Preserve's work pays for.
TUNED_SHARE = 0.56
# Of each method four settings are tried: rates about the best of earlier studies on the same base, and Muon.
MUON_OR_ADAMW = "train.optimiser=muon,muon,muon,adamw"


@dataclass(frozen=True)
class Method:
    """What makes a config one of a method, and what is tried in tuning it (`scale sweep --paired`)."""

    overrides: tuple[str, ...]
    tried: tuple[str, ...]


METHODS = {
    "full": Method(
        ("method.variant=full",),
        (MUON_OR_ADAMW, "train.lr=2e-2,2e-2,1e-2,2e-3", "train.lr_multipliers.embedding=1,2,2,10"),
    ),
    "lora-r16": Method(
        ("method.variant=lora",), ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,2e-2,5e-3")
    ),
    "lora-r128-embeddings": Method(
        ("method.variant=lora", "method.lora={rank: 128, alpha: 256, embeddings: true}"),
        (MUON_OR_ADAMW, "train.lr=2e-2,2e-2,1e-2,5e-3", "train.lr_multipliers.embedding=1,2,2,4"),
    ),
    "llama-pro": Method(
        ("method.variant=llama-pro",), ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,8e-3,2e-3")
    ),
    "preserve": Method(
        ("method.variant=preserve", "method.collaboration.layers=null"),
        (
            "train.optimiser=muon,muon,adamw,adamw",
            "train.lr=2e-2,2e-2,5e-3,1e-2",
            # Beside Muon, what AdamW has at 5e-3 and at 1e-2.
            "train.lr_multipliers.embedding=200,400,null,null",
            "train.lr_multipliers.head=0.5,1,null,null",
            "train.lr_multipliers.gains=0.025,0.05,null,null",
        ),
    ),
}


def main() -> None:
    """Tune every method, run it, and compare."""
    given = sys.argv[1:]
    path = given.pop(0) if given and "=" not in given[0] else "configs/petitions.yaml"
    configs = {name: load_config(Path(path), [*method.overrides, *given]) for name, method in METHODS.items()}
    root = configs["preserve"].output_dir
    given += [f"corpus.cache_dir={root / 'tokens'}"]
    runs: dict[tuple[str, str], list[Path]] = {}
    for name, method in METHODS.items():
        print(f"==== {name}", flush=True)
        overrides = [*method.overrides, *given]
        tuning = root / name / "tuning"
        of_tuning = [*tuning_overrides(configs[name]), f"output_dir={tuning}"]
        scale("sweep", path, *overrides, *of_tuning, *method.tried, "--paired")
        best = read_json(tuning / "report" / "report.json")["trials"][0]["values"]
        for budget, steps in budgets(configs, name).items():
            for seed in SEEDS:
                folder = root / name / f"{budget}-seed{seed}"
                last = [f"seed={seed}", f"train.max_steps={steps}", f"output_dir={folder}"]
                scale("run", path, *overrides, *best, *last)
                runs.setdefault((name, budget), []).append(folder)
    write_text(root / "table.md", f"{table(runs, configs).markdown()}\n")
    folders = [str(folder) for of_one in runs.values() for folder in of_one]
    scale("compare", *folders, "--output", str(root / "comparison"))


def scale(*words: str) -> None:
    """Run one verb in a process of its own, so that each run's peak memory is its own; stop where it fails."""
    finished = subprocess.run([sys.executable, "-m", "scale_cli", *words], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def tuning_overrides(config: RunConfig) -> list[str]:
    """Return what makes a config one to tune with: other documents, another seed, fewer steps."""
    source = config.corpus.sources[0].model_dump(exclude={"weight", "name"})
    held_back = [{**source, "name": "tuning", "max_documents": HELD_BACK, "role": "acquisition"}]
    return [
        f"evaluation.perplexity={json.dumps(held_back)}",
        f"corpus.sources.0.skip_documents={HELD_BACK}",
        f"train.max_steps={int(TUNED_SHARE * config.train.max_steps)}",
        f"seed={TUNING_SEED}",
    ]


def flops_per_token(config: RunConfig) -> float:
    """Return a method's training work on a token."""
    return ideal_flops_per_token(load_base_config(config.model), config.method, config.corpus.sequence_length).total


def budgets(configs: dict[str, RunConfig], name: str) -> dict[str, int]:
    """Return the steps of a method at as many tokens as the config says, and at the work that those are of Preserve."""
    steps = configs[name].train.max_steps
    relative = flops_per_token(configs[name]) / flops_per_token(configs["preserve"])
    return {"tokens": steps} | ({} if name == "preserve" else {"work": round(steps / relative)})


def table(runs: dict[tuple[str, str], list[Path]], configs: dict[str, RunConfig]) -> Table:
    """Return a row for every method and budget of which runs are there: their means, and their range.

    The corpora are the first of each role; routed is the model beside its base, by the posterior rule.
    """
    rows, unit = [], flops_per_token(configs["preserve"]) * configs["preserve"].train.max_steps
    for (name, budget), folders in runs.items():
        files = [file for folder in folders if (file := folder / "evaluation" / "report.json").is_file()]
        if not (reports := [Report.from_json(read_json(file)) for file in files]):
            continue
        learned = [report.with_role("acquisition")[0].heads["adapted"] for report in reports]
        row = [name, budget, str(len(reports)), str(reports[0].step)]
        row += [number(reports[0].step * flops_per_token(configs[name]) / unit, 2)]
        row += [spread([head.nats_per_token for head in learned]), spread([head.bits_per_byte for head in learned])]
        for served in ("adapted", "posterior"):
            kept = [report.with_role("retention")[0].heads[served] for report in reports]
            row += [spread([head.bits_per_byte_difference.value for head in kept])]
            row += [spread([head.worst_document_nats for head in kept], 1)]
        rows.append(row)
    titles = ["method", "equal", "seeds", "steps", "work", "learned, nats/token", "bits/byte"]
    kept_titles = ["lost, plain, bits/byte", "worst document, nats", "lost, routed, bits/byte", "worst document, nats"]
    return Table([*titles, *kept_titles], rows, "ll" + "r" * (len(titles) + len(kept_titles) - 2))


def spread(values: list[float | None], digits: int = 3) -> str:
    """Return the mean of some figures, and of several their range."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return NOT_FINITE
    told = number(mean(finite), digits)
    return told if len(finite) == 1 else f"{told} [{number(min(finite), digits)}, {number(max(finite), digits)}]"


if __name__ == "__main__":
    main()
