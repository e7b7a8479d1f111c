"""Folders that look like finished runs, with figures as asked for: no model is trained."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from scale_cli.evaluation.results import (
    HEADS_AND_RULES,
    BenchmarkHead,
    BenchmarkResult,
    CorpusResult,
    HeadResult,
    Report,
)
from scale_cli.methods import METHODS
from scale_cli.report import Interval
from scale_cli.runs.folder import trained_sha256
from scale_cli.storage.atomic import new_folder, write_json
from scale_cli.upscale.base_files import BaseRecord

BASE_BITS = {"en": 0.95, "ko": 2.6}
_WIDENED = ("preserve", "adapt", "route")
_COST = {
    "trainable_parameters": 400_000,
    "total_parameters": 1_400_000,
    "tokens_per_s": 6_000.5,
    "peak_memory_bytes": 852_000_000,
    "device": "cpu",
    "num_processes": 1,
    "saving_s": 0.25,
}


@dataclass(frozen=True)
class Made:
    """What a made-up run is to report."""

    variant: str = "full"
    lost: float | None = 0.4  # of English, bits/byte, served alone; None for not finite
    gained: float | None = 0.9  # of Korean, likewise
    benchmarks: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # difference in accuracy, p_holm
    base: str = "a" * 64  # hash of the base's only tensor
    quantisation: str | None = None
    train: dict[str, Any] = field(default_factory=dict)  # keys of the config's section
    router: dict[str, Any] = field(default_factory=dict)  # with which it was measured
    new_tokens: int = 0  # with which Korean takes a quarter of the tokens


def write_run(folder: Path, made: Made) -> Path:
    """Write the folder, and return it."""
    with new_folder(folder / "final") as final:
        write_json(final / "position.json", {"step": 100, "num_tokens": 102_400, "elapsed_s": 20.0})
        kept = "" if made.quantisation is None else f", linear maps in {made.quantisation}"
        BaseRecord("some/base", None, f"float32{kept}", {"weight": made.base}, "", "").save(final)
        write_json(final / "method.json", {"variant": made.variant})
        write_json(final / "config.json", _model_config(made))
        (final / "scale.yaml").write_text(yaml.safe_dump(_config(folder, made)))
        (final / "trained.safetensors").write_text("nobody reads it")
        write_json(final / "cost.json", _COST)
    report = replace(report_of(made), trained_sha256=trained_sha256(folder / "final"))
    (folder / "evaluation").mkdir()
    measured = _config(folder, made)
    measured["method"] |= {"router": made.router}
    (folder / "evaluation" / "scale.yaml").write_text(yaml.safe_dump(measured))
    write_json(folder / "evaluation" / "report.json", report.to_json())
    return folder


def _model_config(made: Made) -> dict[str, Any]:
    grown = {"new_tokens": [f"7 {token}" for token in range(made.new_tokens)]}
    if made.variant not in _WIDENED:
        return {"model_type": "llama", **grown}
    layers = {"preserve": [], "adapt": [0, 1, 2, 3], "route": [3]}[made.variant]
    return {
        **grown,
        "base_config": {"num_hidden_layers": 4},
        "attention_collaboration_layers": layers,
        "mlp_collaboration_layers": [],
    }


def _config(folder: Path, made: Made) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "model": {"base": "some/base", "quantisation": made.quantisation},
        "method": {"variant": made.variant}
        | ({"vocabulary": {"new_tokens": made.new_tokens}} if made.new_tokens else {}),
        "corpus": {"sources": [{"name": "web", "path": "web.txt", "language": "ko"}]},
        "train": {"max_steps": 100, "lr": 1e-3} | made.train,
    }


def report_of(made: Made) -> Report:
    """Return the report of a made-up run; mixed with the base it loses next to nothing, and gains all but as much."""
    corpora = []
    for name, language, role, change in (
        ("stories", "en", "retention", made.lost),
        ("청원", "ko", "acquisition", None if made.gained is None else -made.gained),
    ):
        mixed = 0.0007 if role == "retention" else None if change is None else change + 0.0005
        changes = {"base": 0.0, "trained": change, "posterior": mixed, "cosine": change}
        heads = {
            head: _head(BASE_BITS[language], changes[head], head, language)
            for head in HEADS_AND_RULES
        }
        corpora.append(
            CorpusResult(
                name,
                language,
                role,
                num_documents=50,
                num_tokens=5_000 if made.new_tokens and language == "ko" else 20_000,
                num_base_tokens=20_000,
                num_bytes=80_000,
                heads=heads,
                base_of_new_tokens=heads["base"] if made.new_tokens else None,
            )
        )
    benchmarks = [_benchmark(name, *outcome) for name, outcome in made.benchmarks.items()]
    served = METHODS[made.variant].head.replace("routed", "posterior")
    return Report(made.variant, served, 100, 102_400, "t" * 64, corpora, benchmarks)


def _head(base: float, change: float | None, head: str, language: str) -> HeadResult:
    share = {"en": 0.99, "ko": 0.01}[language] if head in ("posterior", "cosine") else None
    if change is None:
        nothing = Interval(None, None, None)
        return HeadResult(None, None, None, nothing, None, share)
    width = 0.0 if head == "base" else 0.01 if abs(change) > 0.001 else 0.0002
    difference = Interval(change, change - width, change + width)
    return HeadResult(base * 3, 2.0 ** (base + change), base + change, difference, 0.69, share)


def _benchmark(name: str, difference: float, p_holm: float) -> BenchmarkResult:
    language = "ko" if name.startswith("kobest") else "en"
    heads = {"base": BenchmarkHead({"acc": Interval(0.52, 0.48, 0.56)}, {})}
    for head in HEADS_AND_RULES[1:]:
        acc = Interval(0.52 + difference, 0.48 + difference, 0.56 + difference)
        change = Interval(difference, difference - 0.02, difference + 0.02)
        heads[head] = BenchmarkHead({"acc": acc}, {"acc": change}, 40, 20, p_holm / 2, p_holm)
    return BenchmarkResult(
        name, language, "retention" if language == "en" else "acquisition", 500, heads
    )
