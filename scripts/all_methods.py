"""Every method, tuned by as many runs as every other, then run with several seeds, and all of it in one table.

    python scripts/all_methods.py [--tuned-share 1.0] [--only METHOD]... [CONFIG] [KEY.SUB=VALUE]...

CONFIG is configs/petitions.yaml where none is named. Each method is tuned (`scale sweep`) on documents of the first
training source that nothing is trained on meanwhile and that are not those reported, then run at as many tokens as the
config says, replay among them, and at as much training work (`scale plan`) as those tokens are of Preserve. It is tuned
at as many steps as are reported, or at a share of them, half at the least: what is tuned at fewer likes rates that are
too high for more. Everything lands in output_dir: METHOD/tuning, METHOD/tokens-seed0, ..., table.md, comparison/. What
is finished is not run again. What ADEPT measures its rates by, 3 % of its work at these steps, is not in the table's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.evaluation.results import Report
from scale_cli.report import NOT_FINITE, Table, number
from scale_cli.storage.atomic import read_json, write_text
from scale_cli.upscale.base import load_base_config
from scripts.benchmark.algebra import ideal_flops_per_token

SEEDS, TUNING_SEED = (0, 1, 2), 3
HELD_BACK = 60
LEAST_TUNED_SHARE = 0.5
# Of each method four settings are tried: rates about the best of earlier studies on the same base, and Muon.
MUON_OR_ADAMW = "train.optimiser=muon,muon,muon,adamw"


# Text of what the base knows, where a config has none itself.
KNOWN = {"name": "eltec-train", "path": "../shared/data/en-eltec/train.txt.xz", "language": "en", "role": "replay"}


@dataclass(frozen=True)
class Method:
    """What makes a config one of a method, and what is tried in tuning it (`scale sweep --paired`)."""

    overrides: tuple[str, ...]
    tried: tuple[str, ...]
    # of text that the base knows, relative to a new source's weight of 1: 1/3 is a quarter of the windows, and 0 is
    # only measured on; None: none is read
    replay: float | None = None

    def makes(self, path: Path, given: list[str]) -> list[str]:
        """Return the overrides that make a config one of the method, those given among them."""
        if self.replay is None:
            return [*self.overrides, *given]
        sources = [source.model_dump(mode="json") for source in load_config(path, given).corpus.sources]
        if all(source["role"] == "new" for source in sources):
            sources.append(dict(KNOWN))
        for source in sources:
            source["weight"] = self.replay if source["role"] == "replay" else source["weight"]
        return [*self.overrides, *given, f"corpus.sources={json.dumps(sources, ensure_ascii=False)}"]


# Of full fine-tuning's kin: at 125 steps the third is its best that is known (docs/results/rivals.md).
OF_FULL = (MUON_OR_ADAMW, "train.lr=2e-2,5e-3,1e-2,2e-3", "train.lr_multipliers.embedding=1,4,2,10")
OF_PRESERVE = (
    "train.optimiser=muon,muon,adamw,adamw",
    "train.lr=2e-2,2e-2,5e-3,1e-2",
    # Beside Muon, what AdamW has at 5e-3 and at 1e-2.
    "train.lr_multipliers.embedding=200,400,null,null",
    "train.lr_multipliers.head=0.5,1,null,null",
    "train.lr_multipliers.gains=0.025,0.05,null,null",
)
METHODS = {
    "full": Method(("method.variant=full",), OF_FULL),
    "full-replay": Method(("method.variant=full",), OF_FULL, replay=1 / 3),
    "full-mer": Method(
        ("method.variant=full", "train.optimiser=muon", "train.lr_multipliers.embedding=2"),
        (
            "train.lr=1e-2,1e-2,2e-2,2e-2",
            "train.lookahead={every_steps: 5, share: 0.5},{every_steps: 25, share: 0.5},"
            "{every_steps: 5, share: 0.5},{every_steps: 25, share: 0.1}",
        ),
        replay=1 / 3,
    ),
    "full-decay-to-base": Method(
        ("method.variant=full", "train.decay_to_base=true", "train.optimiser=muon", "train.lr_multipliers.embedding=2"),
        ("train.lr=1e-2,1e-2,1e-2,2e-2", "train.weight_decay=0.1,1,4,1"),
    ),
    "osf": Method(("method.variant=osf",), ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,5e-3,1e-3")),
    "adept": Method(
        ("method.variant=adept", "method.adept={every_steps: 25}"),
        ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,8e-3,2e-3"),
        replay=0.0,
    ),
    "lora-r16": Method(
        ("method.variant=lora",), ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,2e-2,5e-3")
    ),
    "lora-r128-embeddings": Method(
        ("method.variant=lora", "method.lora={rank: 128, alpha: 256, embeddings: true}"),
        (MUON_OR_ADAMW, "train.lr=2e-2,2e-2,1e-2,5e-3", "train.lr_multipliers.embedding=1,2,2,4"),
    ),
    # Its scale is 11 times that of the one above, so its rates are lower.
    "lora-r128-rank-stabilised": Method(
        ("method.variant=lora", "method.lora={rank: 128, alpha: 256, embeddings: true, rank_stabilised: true}"),
        (MUON_OR_ADAMW, "train.lr=2e-2,5e-3,2e-3,1e-3", "train.lr_multipliers.embedding=2,8,20,20"),
    ),
    "llama-pro": Method(
        ("method.variant=llama-pro",), ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,8e-3,2e-3")
    ),
    "preserve": Method(("method.variant=preserve", "method.collaboration.layers=null"), OF_PRESERVE),
    # A tenth of the windows, on which the base is what is learned.
    "preserve-replay": Method(
        ("method.variant=preserve", "method.collaboration.layers=null", "method.distillation.weight=1"),
        OF_PRESERVE,
        replay=1 / 9,
    ),
}


def main() -> None:
    """Tune every method, run it, and compare."""
    asked = parsed(sys.argv[1:])
    given = [*asked.given]
    path = Path(given.pop(0) if given and "=" not in given[0] else "configs/petitions.yaml")
    methods = {name: METHODS[name] for name in asked.only or METHODS}
    root = load_config(path, given).output_dir
    given += [f"corpus.cache_dir={root / 'tokens'}"]
    overrides = {name: METHODS[name].makes(path, given) for name in METHODS}
    configs = {name: load_config(path, of_method) for name, of_method in overrides.items()}
    runs: dict[tuple[str, str], list[Path]] = {}
    for name, method in methods.items():
        print(f"==== {name}", flush=True)
        of_tuning = [*overrides[name], *tuning_overrides(configs[name])]
        best = tune(method, path, of_tuning, root / name, round(asked.tuned_share * configs[name].train.max_steps))
        for budget, steps in budgets(configs, name).items():
            for seed in SEEDS:
                folder = root / name / f"{budget}-seed{seed}"
                scale("run", str(path), *overrides[name], *best, *words_of_run(steps, folder, seed))
                runs.setdefault((name, budget), []).append(folder)
    write_text(root / "table.md", f"{table(runs, configs).markdown()}\n")
    folders = [str(folder) for of_one in runs.values() for folder in of_one]
    scale("compare", *folders, "--output", str(root / "comparison"))


def parsed(words: list[str]) -> argparse.Namespace:
    """Return what the command line asks for, or end with what is wrong with it."""
    parser = argparse.ArgumentParser(description="Every method tuned, run and compared.")
    parser.add_argument(
        "--tuned-share", type=float, default=1.0, help="of the reported steps, that methods are tuned at"
    )
    parser.add_argument("--only", action="append", choices=METHODS, help="these methods")
    parser.add_argument("given", nargs="*", metavar="[CONFIG] KEY.SUB=VALUE")
    asked = parser.parse_args(words)
    if not LEAST_TUNED_SHARE <= asked.tuned_share <= 1.0:
        parser.error(f"--tuned-share {asked.tuned_share}: from {LEAST_TUNED_SHARE} to 1.0")
    return asked


def words_of_run(steps: int, folder: Path, seed: int) -> list[str]:
    """Return what makes a config a run of some length in a folder."""
    return [f"seed={seed}", f"train.max_steps={steps}", f"output_dir={folder}"]


def tune(method: Method, path: Path, overrides: list[str], folder: Path, steps: int) -> list[str]:
    """Return the best of what is tried."""
    place = folder / "tuning"
    words = words_of_run(steps, place, TUNING_SEED)
    scale("sweep", str(path), *overrides, *words, *method.tried, "--paired")
    best: list[str] = read_json(place / "report" / "report.json")["trials"][0]["values"]
    return best


def scale(*words: str) -> None:
    """Run one verb in a process of its own, so that each run's peak memory is its own; stop where it fails."""
    finished = subprocess.run([sys.executable, "-m", "scale_cli", *words], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


def tuning_overrides(config: RunConfig) -> list[str]:
    """Return what makes a config one to tune with: other documents."""
    source = config.corpus.sources[0].model_dump(include=set(TextSource.model_fields))
    held_back = [{**source, "name": "tuning", "max_documents": HELD_BACK, "role": "acquisition"}]
    return [
        f"evaluation.perplexity={json.dumps(held_back)}",
        f"corpus.sources.0.skip_documents={HELD_BACK}",
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
        steps = budgets(configs, name)[budget]
        row = [name, budget, str(len(reports)), str(steps)]
        row += [number(steps * flops_per_token(configs[name]) / unit, 2)]
        row += [spread([head.nats_per_token for head in learned]), spread([head.bits_per_byte for head in learned])]
        for served in ("adapted", "posterior"):
            kept = [report.with_role("retention")[0].heads[served] for report in reports]
            row += [spread([head.bits_per_byte_difference.value for head in kept], 4)]
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
