"""Tune every method with the same number of runs, run it with several seeds, and put all results in one table.

    python -m scripts.research.rivals [--tuned-share 1.0] [--only METHOD]... [CONFIG] [KEY.SUB=VALUE]...

CONFIG is configs/petitions.yaml by default. Each method is tuned on documents of the first training
source: nothing is trained on these meanwhile, and they are not the reported ones. Then each method runs at as many
tokens as the config says, replay included, and at as much training work (`scale plan`) as Preserve does on them. Tuning
takes the reported number of steps, or a share of it, but at least half: tuning with fewer steps prefers rates that are
too high for more steps. Everything is in output_dir: METHOD/tuning, METHOD/tokens-seed0, ..., table.md, comparison/.
Finished runs are skipped. The table's work is without ADEPT's measuring of its rates, 3 % of its work at these steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import scripts.research.registered  # noqa: F401  before the config is imported
from scale_cli.config.load import load_config, parse
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import TextSource
from scale_cli.errors import CheckFailed
from scale_cli.evaluation.results import Report
from scale_cli.report import NOT_FINITE, Table, number
from scale_cli.storage.atomic import read_json, write_text
from scale_cli.upscale.base import load_base_config
from scripts.benchmark.algebra import ideal_flops_per_token
from scripts.research.adept import layers_of_run

SCALE = (sys.executable, "-m", "scripts.research")
SEEDS, TUNING_SEED = (0, 1, 2), 3
HELD_BACK = 60
LEAST_TUNED_SHARE = 0.5
# Four settings are tried per method: rates around the best of earlier studies on the same base, and Muon.
MUON_OR_ADAMW = "train.optimiser=muon,muon,muon,adamw"


# Text that the base knows, for a config without its own.
KNOWN = {
    "name": "eltec-train",
    "path": "../shared/data/en-eltec/train.txt.xz",
    "language": "en",
    "role": "replay",
}


@dataclass(frozen=True)
class Method:
    """The overrides that select a method, and the values tried in tuning it: first of each key, then second."""

    overrides: tuple[str, ...]
    tried: tuple[str, ...]
    # weight of text that the base knows, relative to a new source's 1: 1/3 is a quarter of the windows, and 0 is only
    # measured on; None: no such text is read
    replay: float | None = None

    def makes(self, path: Path, given: list[str]) -> list[str]:
        """Return the overrides that make a config one of the method, with the given overrides included."""
        if self.replay is None:
            return [*self.overrides, *given]
        sources = [
            source.model_dump(mode="json") for source in load_config(path, given).corpus.sources
        ]
        if all(source["role"] == "new" for source in sources):
            sources.append(dict(KNOWN))
        for source in sources:
            source["weight"] = self.replay if source["role"] == "replay" else source["weight"]
        return [
            *self.overrides,
            *given,
            f"corpus.sources={json.dumps(sources, ensure_ascii=False)}",
        ]


# For full fine-tuning and its variants: at 125 steps the third is the best known (docs/results/rivals.md).
OF_FULL = (MUON_OR_ADAMW, "train.lr=2e-2,5e-3,1e-2,2e-3", "train.lr_multipliers.embedding=1,4,2,10")
OF_PRESERVE = (
    "train.optimiser=muon,muon,adamw,adamw",
    "train.lr=2e-2,2e-2,5e-3,1e-2",
    # For Muon, what AdamW has at 5e-3 and at 1e-2.
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
        (
            "method.variant=full",
            "train.weight_decay=0",
            "train.optimiser=muon",
            "train.lr_multipliers.embedding=2",
        ),
        ("train.lr=1e-2,1e-2,1e-2,2e-2", "train.decay_to_base=0.1,1,4,1"),
    ),
    "osf": Method(
        ("method.variant=osf",),
        ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,5e-3,1e-3"),
    ),
    "adept": Method(
        ("method.variant=adept", "method.adept={every_steps: 25}"),
        ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,8e-3,2e-3"),
        replay=0.0,
    ),
    "lora-r16": Method(
        ("method.variant=lora",),
        ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,2e-2,5e-3"),
    ),
    "lora-r128-embeddings": Method(
        ("method.variant=lora", "method.lora={rank: 128, alpha: 256, embeddings: true}"),
        (MUON_OR_ADAMW, "train.lr=2e-2,2e-2,1e-2,5e-3", "train.lr_multipliers.embedding=1,2,2,4"),
    ),
    # Its scale is 11 times that of the method above, so its rates are lower.
    "lora-r128-rank-stabilised": Method(
        (
            "method.variant=lora",
            "method.lora={rank: 128, alpha: 256, embeddings: true, rank_stabilised: true}",
        ),
        (MUON_OR_ADAMW, "train.lr=2e-2,5e-3,2e-3,1e-3", "train.lr_multipliers.embedding=2,8,20,20"),
    ),
    "llama-pro": Method(
        ("method.variant=llama-pro",),
        ("train.optimiser=muon,muon,adamw,adamw", "train.lr=2e-2,5e-3,8e-3,2e-3"),
    ),
    "preserve": Method(
        ("method.variant=preserve", "method.collaboration.layers=null"), OF_PRESERVE
    ),
    # A tenth of the windows is replay, on which the base is distilled.
    "preserve-replay": Method(
        (
            "method.variant=preserve",
            "method.collaboration.layers=null",
            "method.distillation.weight=1",
        ),
        OF_PRESERVE,
        replay=1 / 9,
    ),
}


def main() -> None:
    """Tune, run and compare every method."""
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
        if name == "adept":
            overrides[name].append(f"method.adept.layers={layers_of_run(configs[name])}")
        best = tune(
            method,
            path,
            of_tuning,
            root / name,
            round(asked.tuned_share * configs[name].train.max_steps),
        )
        for budget, steps in budgets(configs, name).items():
            for seed in SEEDS:
                folder = root / name / f"{budget}-seed{seed}"
                scale("run", str(path), *overrides[name], *best, *words_of_run(steps, folder, seed))
                runs.setdefault((name, budget), []).append(folder)
    write_text(root / "table.md", f"{table(runs, configs).markdown()}\n")
    folders = [str(folder) for of_one in runs.values() for folder in of_one]
    scale("compare", *folders, "--output", str(root / "comparison"))


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line; exit with an error message if it is wrong."""
    parser = argparse.ArgumentParser(description="Every method tuned, run and compared.")
    parser.add_argument(
        "--tuned-share",
        type=float,
        default=1.0,
        help="of the reported steps, that methods are tuned at",
    )
    parser.add_argument("--only", action="append", choices=METHODS, help="these methods")
    parser.add_argument("given", nargs="*", metavar="[CONFIG] KEY.SUB=VALUE")
    asked = parser.parse_args(words)
    if not LEAST_TUNED_SHARE <= asked.tuned_share <= 1.0:
        parser.error(f"--tuned-share {asked.tuned_share}: from {LEAST_TUNED_SHARE} to 1.0")
    return asked


def words_of_run(steps: int, folder: Path, seed: int) -> list[str]:
    """Return the overrides for a run of some length in a folder."""
    return [f"seed={seed}", f"train.max_steps={steps}", f"output_dir={folder}"]


def tune(method: Method, path: Path, overrides: list[str], folder: Path, steps: int) -> list[str]:
    """Tune a method, and return the overrides of its best run."""
    learned: dict[tuple[str, ...], float] = {}
    for index, values in enumerate(paired(method.tried)):
        place = folder / "tuning" / str(index)
        words = [*overrides, *words_of_run(steps, place, TUNING_SEED), *values]
        ended = subprocess.run([*SCALE, "run", str(path), *words], check=False).returncode
        if ended not in (0, CheckFailed.exit_code):
            continue  # it diverged
        report = Report.load(place / "evaluation")
        bits = report.with_role("acquisition")[0].heads[report.served].bits_per_byte
        if bits is not None:
            learned[values] = bits
    return [*min(learned, key=lambda values: learned[values])]


def paired(tried: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the overrides of each run: the first value of every key, then the second, and so on."""
    axes = []
    for argument in tried:
        key, _, written = argument.partition("=")
        axes.append([f"{key}={json.dumps(value)}" for value in parse(f"[{written}]", argument)])
    return list(zip(*axes, strict=True))


def scale(*words: str) -> None:
    """Run one verb in its own process, so that its peak memory is measured alone; exit if it fails.

    A rival that got worse at what it was to learn is a result too.
    """
    ended = subprocess.run([*SCALE, *words], check=False).returncode
    if ended not in (0, CheckFailed.exit_code):
        sys.exit(ended)


def tuning_overrides(config: RunConfig) -> list[str]:
    """Return the overrides for tuning: documents that are held back from training."""
    source = config.corpus.sources[0].model_dump(include=set(TextSource.model_fields))
    held_back = [{**source, "name": "tuning", "max_documents": HELD_BACK, "role": "acquisition"}]
    return [
        f"evaluation.perplexity={json.dumps(held_back)}",
        f"corpus.sources.0.skip_documents={HELD_BACK}",
    ]


def flops_per_token(config: RunConfig) -> float:
    """Return a method's training FLOPs per token."""
    return ideal_flops_per_token(
        load_base_config(config.model), config.method, config.corpus.sequence_length
    ).total


def budgets(configs: dict[str, RunConfig], name: str) -> dict[str, int]:
    """Return a method's steps by budget: the config's tokens, and the work that Preserve does on those tokens."""
    steps = configs[name].train.max_steps
    relative = flops_per_token(configs[name]) / flops_per_token(configs["preserve"])
    return {"tokens": steps} | ({} if name == "preserve" else {"work": round(steps / relative)})


def table(runs: dict[tuple[str, str], list[Path]], configs: dict[str, RunConfig]) -> Table:
    """Return a row for each method and budget with finished runs: means and ranges over seeds.

    The corpora are the first of each role; routed is the model beside its base, mixed by the posterior rule.
    """
    rows, unit = [], flops_per_token(configs["preserve"]) * configs["preserve"].train.max_steps
    for (name, budget), folders in runs.items():
        files = [
            file for folder in folders if (file := folder / "evaluation" / "report.json").is_file()
        ]
        if not (reports := [Report.from_json(read_json(file)) for file in files]):
            continue
        learned = [report.with_role("acquisition")[0].heads["trained"] for report in reports]
        steps = budgets(configs, name)[budget]
        row = [name, budget, str(len(reports)), str(steps)]
        row += [number(steps * flops_per_token(configs[name]) / unit, 2)]
        row += [
            spread([head.nats_per_token for head in learned]),
            spread([head.bits_per_byte for head in learned]),
        ]
        for served in ("trained", "posterior"):
            kept = [report.with_role("retention")[0].heads[served] for report in reports]
            row += [spread([head.bits_per_byte_difference.value for head in kept], 4)]
            row += [spread([head.worst_document_nats for head in kept], 1)]
        rows.append(row)
    titles = ["method", "equal", "seeds", "steps", "work", "learned, nats/token", "bits/byte"]
    kept_titles = [
        "lost, plain, bits/byte",
        "worst document, nats",
        "lost, routed, bits/byte",
        "worst document, nats",
    ]
    return Table([*titles, *kept_titles], rows, "ll" + "r" * (len(titles) + len(kept_titles) - 2))


def spread(values: list[float | None], digits: int = 3) -> str:
    """Return the mean of some figures, with the range if there are several."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return NOT_FINITE
    told = number(mean(finite), digits)
    return (
        told
        if len(finite) == 1
        else f"{told} [{number(min(finite), digits)}, {number(max(finite), digits)}]"
    )


if __name__ == "__main__":
    main()
