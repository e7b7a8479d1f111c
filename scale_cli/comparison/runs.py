"""Finished runs of one base, read if they can be compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CORPORA
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.evaluation.results import Report
from scale_cli.runs.folder import RunFolder, trained_sha256
from scale_cli.storage.atomic import MANIFEST, read_json
from scale_cli.training.records import Cost
from scale_cli.upscale.base_files import BaseRecord

# Relative. Rounding, also to bfloat16, moves the base's loss by less; another context, by more.
_SAME_BASE_LOSS = 5e-3


@dataclass(frozen=True)
class ComparedRun:
    """One finished run."""

    name: str  # short, distinct in this comparison
    folder: Path  # its path, as the user gave it
    config: RunConfig  # what it was trained with, and routed and measured by
    report: Report
    base: BaseRecord
    model_config: dict[str, Any]  # of the trained model, as transformers writes it
    cost: Cost
    trained_on: list[str]  # names of the texts, which hang on their content

    def other_texts(self, than: ComparedRun) -> list[str]:
        """Return which texts do not have the content that they have in another run, or were read
        otherwise. A name hangs on the tokenizer too, so nothing is known beside new tokens.
        """
        both = (self, than)
        if any(corpus.has_new_tokens for run in both for corpus in run.report.corpora):
            return []
        here, there = (
            dict(zip((of.name for of in run.report.corpora), run.report.texts, strict=False))
            for run in both
        )
        others = [name for name, text in here.items() if text != there.get(name)]
        return others + ["what was trained on"] * (self.trained_on != than.trained_on)


def load_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read runs in the order given.

    Raises RunFolderError if one is not finished, or cannot be compared with the first.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder, whole in zip(folders, resolved, strict=True):
        if resolved.count(whole) > 1:
            raise RunFolderError(f"{folder}: given twice")
    shared = os.path.commonpath([whole.parent for whole in resolved])
    runs = [
        _load_run(folder, whole.relative_to(shared).as_posix())
        for folder, whole in zip(folders, resolved, strict=True)
    ]
    for run in runs[1:]:
        _check_comparable(runs[0], run)
    return runs


def _load_run(folder: Path, name: str) -> ComparedRun:
    run = RunFolder(folder)
    for path, verb in ((run.final / MANIFEST, "train"), (run.evaluation / Report.FILE, "evaluate")):
        if not path.is_file():
            missing = f"{path.relative_to(folder)} is missing (`scale {verb}` writes it)"
            raise RunFolderError(f"{folder}: not a finished run, {missing}")
    try:
        report = Report.load(run.evaluation)
    except StorageError as error:
        raise StorageError(f"{error}; run `scale evaluate` again") from None
    if report.trained_sha256 != trained_sha256(run.final):
        raise RunFolderError(
            f"{run.evaluation}: measures another training than {run.final}; "
            "run `scale evaluate` again"
        )
    measured = load_config(run.evaluation / "scale.yaml")
    return ComparedRun(
        name=name,
        folder=folder,
        config=load_config(run.final / "scale.yaml").model_copy(
            update={"method": measured.method, "evaluation": measured.evaluation}
        ),
        report=report,
        base=BaseRecord.load(run.final),
        model_config=read_json(run.final / "config.json"),
        cost=Cost.load(run.final),
        trained_on=read_json(run.final / CORPORA) if (run.final / CORPORA).is_file() else [],
    )


def _check_comparable(first: ComparedRun, other: ComparedRun) -> None:
    both = f"{first.folder} and {other.folder}"
    if first.base.content_sha256 != other.base.content_sha256:
        bases = " and ".join(f"{run.base.name} in {run.base.dtype}" for run in (first, other))
        raise RunFolderError(f"runs on different base models cannot be compared: {both} ({bases})")

    corpora = "runs must be evaluated on the same corpora"
    names = [{corpus.name for corpus in run.report.corpora} for run in (first, other)]
    for name in sorted(names[0] ^ names[1]):
        raise RunFolderError(
            f"{corpora}: only one of {both} has {name}; they are matched by name (evaluation.perplexity.0.name=...)"
        )
    for before in first.report.corpora:
        now = other.report.corpus(before.name)
        for key in ("language", "role", "num_documents", "num_bytes", "num_base_tokens"):
            values = [getattr(before, key), getattr(now, key)]
            if values[0] != values[1]:
                told = f"{before.name} has {key} {values[0]} and {values[1]} in {both}"
                raise RunFolderError(f"{corpora}: {told}")
        nats = before.heads["base"].nats_per_token
        nats_now = now.heads["base"].nats_per_token
        if nats is None or nats_now is None:
            continue
        if abs(nats - nats_now) > _SAME_BASE_LOSS * abs(nats):
            raise RunFolderError(
                f"runs must be evaluated with the same settings: on {before.name} the base has "
                f"{nats:.4f} and {nats_now:.4f} nats/token in {both} "
                "(is evaluation.sequence_length the same?)"
            )

    for benchmark in other.report.benchmarks:
        same = first.report.benchmark(benchmark.name)
        if same is not None and same.num_items != benchmark.num_items:
            raise RunFolderError(
                "runs must be evaluated on the same items: "
                f"{benchmark.name} has {same.num_items} and {benchmark.num_items} in {both}"
            )
