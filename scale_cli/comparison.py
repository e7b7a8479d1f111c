"""Finished runs of one base, read if they are comparable, and each way of serving them.

A trained model can be served alone, or mixed with the untouched base by the posterior rule. A
widened model contains that base. Any other method needs it as a second model, with a second pass
for every token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.evaluation.results import Report
from scale_cli.report import NO_INTERVAL, Interval
from scale_cli.runs.folder import RunFolder, trained_sha256
from scale_cli.storage.atomic import MANIFEST, read_json
from scale_cli.training.records import Cost
from scale_cli.upscale.base_record import BaseRecord

# Relative. Rounding, also to bfloat16, moves the base's loss by less; another context, by more.
_SAME_BASE_LOSS = 5e-3


@dataclass(frozen=True)
class ComparedRun:
    """One finished run."""

    name: str  # short, distinct in this comparison
    folder: Path  # its path, as the user gave it
    config: RunConfig  # what it was trained with
    report: Report
    base: BaseRecord
    model_config: dict[str, Any]  # of the trained model, as transformers writes it
    cost: Cost


@dataclass(frozen=True)
class Option:
    """One trained model, served in one way."""

    run: ComparedRun
    head: str  # of its report: trained | posterior | cosine
    label: str  # distinct, for the figure and the tables
    served: str  # in words
    num_models: int  # held in memory: 1 or 2
    passes: str  # forward passes for every token, in words
    # Bits per byte on what the base knew, and on what was taught: means over the corpora of a role.
    bits_per_byte_lost: Interval
    bits_per_byte_gained: Interval
    base_share_by_language: dict[str, float] | None  # of the tokens; None if nothing is mixed


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
    return ComparedRun(
        name=name,
        folder=folder,
        config=load_config(run.final / "scale.yaml"),
        report=report,
        base=BaseRecord.load(run.final),
        model_config=read_json(run.final / "config.json"),
        cost=Cost.load(run.final),
    )


def _check_comparable(first: ComparedRun, other: ComparedRun) -> None:
    both = f"{first.folder} and {other.folder}"
    if first.base.content_sha256 != other.base.content_sha256:
        names = []
        for run in (first, other):
            quantised = run.config.model.quantisation
            names.append(f"{run.base.name} in {quantised}" if quantised else run.base.name)
        raise RunFolderError(
            f"runs on different base models cannot be compared: {both} ({' and '.join(names)})"
        )
    measured = {corpus.name: corpus for corpus in first.report.corpora}
    now_measured = {corpus.name: corpus for corpus in other.report.corpora}
    for name in sorted(measured.keys() ^ now_measured.keys()):
        raise RunFolderError(
            f"runs must be evaluated on the same corpora: only one of {both} has {name}"
        )
    for name, corpus in measured.items():
        for key in ("language", "role", "num_documents", "num_bytes", "num_base_tokens"):
            before, now = (getattr(of_run, key) for of_run in (corpus, now_measured[name]))
            if before != now:
                raise RunFolderError(
                    "runs must be evaluated on the same corpora: "
                    f"{name} has {key} {before} and {now} in {both}"
                )
        nats = corpus.heads["base"].nats_per_token
        nats_now = now_measured[name].heads["base"].nats_per_token
        if nats is None or nats_now is None:
            continue
        if abs(nats - nats_now) > _SAME_BASE_LOSS * abs(nats):
            raise RunFolderError(
                f"runs must be evaluated with the same settings: on {name} the base has "
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


def options_of(run: ComparedRun) -> list[Option]:
    """Return the ways to serve a run: as it is configured to be served, then mixed."""
    report = run.report
    method = run.config.method.definition
    options = []
    for head in dict.fromkeys((report.served, "posterior")):
        label = run.name
        served = "alone"
        num_models = 1
        passes = "1"
        if head != "trained" and method.widens:
            served = f"routed, {head}"
            passes = _routed_passes(run.model_config)
            if head != report.served:
                label = f"{run.name}, {'posterior' if method.routes else 'routed'}"
        elif head != "trained":
            label = f"{run.name} + base"
            served = "beside the base, mixed"
            num_models = 2
            passes = "2"
        lost, change = (
            mean_interval(
                [of.heads[head].bits_per_byte_difference for of in report.with_role(role)]
            )
            for role in ("retention", "acquisition")
        )
        options.append(
            Option(
                run=run,
                head=head,
                label=label,
                served=served,
                num_models=num_models,
                passes=passes,
                bits_per_byte_lost=lost,
                bits_per_byte_gained=-change,
                base_share_by_language=(
                    None if head == "trained" else report.base_share_by_language(head)
                ),
            )
        )
    return options


def _routed_passes(model_config: dict[str, Any]) -> str:
    """Return how often a token passes the layers of a widened model.

    Layers from the first collaborating one on run twice.
    """
    num_layers = model_config["base_config"]["num_hidden_layers"]
    collaborating = [
        *model_config["attention_collaboration_layers"],
        *model_config["mlp_collaboration_layers"],
    ]
    twice = num_layers - min(collaborating, default=num_layers)
    return f"1 + {twice}/{num_layers}" if twice else "1"


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of differences measured on different corpora, with its interval.

    The corpora are independent samples, so the arms of their intervals add as the square root of a
    sum of squares. The mean has no value if a part is not finite, and no interval if a part has
    none.
    """
    values = [interval.value for interval in intervals if interval.value is not None]
    if not intervals or len(values) < len(intervals):
        return NO_INTERVAL
    mean = sum(values) / len(values)
    lows, highs = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
    if None in lows or None in highs:
        return Interval(mean, None, None)
    below, above = (math.dist(ends, values) / len(values) for ends in (lows, highs))
    return Interval(mean, mean - below, mean + above)


def front(options: Sequence[Option]) -> list[Option]:
    """Return the options that neither another one of as few models nor the base beats."""
    base = (0, 0.0, 0.0)  # its models do not count, and it lost and gained nothing
    places = [
        (option.num_models, option.bits_per_byte_lost.value, option.bits_per_byte_gained.value)
        for option in options
    ]
    finite = [place for place in places if None not in place]

    def beats(one: Any, other: Any) -> bool:
        is_better = one[1] <= other[1] and one[2] >= other[2] and one[1:] != other[1:]
        return is_better and one[0] <= other[0]

    return [
        option
        for option, place in zip(options, places, strict=True)
        if place in finite and not any(beats(other, place) for other in (base, *finite))
    ]
