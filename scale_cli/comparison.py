"""Finished runs, read from their folders if they are comparable, and each way of serving them: the rows of a table.

A trained model can be served alone, or mixed with the untouched base by the posterior rule. A widened model contains
that base. Any other method needs it as a second model, with a second pass for every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_cli.config.load import load_config
from scale_cli.config.schema import MethodConfig, RunConfig
from scale_cli.errors import RunFolderError, StorageError
from scale_cli.evaluation.results import ROLES, Report
from scale_cli.report import NO_INTERVAL, Interval
from scale_cli.runs.folder import RunFolder, trained_sha256
from scale_cli.storage.atomic import MANIFEST, read_json
from scale_cli.training.records import Cost
from scale_cli.upscale.base_record import BaseRecord
from scale_cli.values import language_name

# Relative. Rounding, also to bfloat16, moves the base's loss by less; another corpus or context length, by more.
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

    @property
    def method(self) -> MethodConfig:
        return self.config.method

    @property
    def passes(self) -> str:
        """How often a token passes the model when routed; layers from the first collaborating one on run twice."""
        num_layers = self.model_config["base_config"]["num_hidden_layers"]
        keys = ("attention_collaboration_layers", "mlp_collaboration_layers")
        twice = num_layers - min(
            (layer for key in keys for layer in self.model_config[key]), default=num_layers
        )
        return f"1 + {twice}/{num_layers}" if twice else "1"


@dataclass(frozen=True)
class Option:
    """One trained model, served in one way."""

    run: ComparedRun
    head: str  # of its own report: trained | posterior | cosine
    label: str  # distinct, for the figure and the tables
    served: str  # in words
    num_models: int  # held in memory: 1 or 2
    passes: str  # forward passes for every token, in words
    lost: Interval  # bits per byte on what the base knew; the mean over the retention corpora
    gained: Interval  # bits per byte on what was taught; the mean over the acquisition corpora
    base_share: dict[str, float] | None  # share of tokens by language; None if nothing is mixed

    @property
    def is_finite(self) -> bool:
        return self.lost.value is not None and self.gained.value is not None


def load_runs(folders: list[Path]) -> list[ComparedRun]:
    """Read the runs in the order given; raise RunFolderError if one cannot be compared with the first."""
    resolved = [folder.resolve() for folder in folders]
    if twice := [
        folder for folder, whole in zip(folders, resolved, strict=True) if resolved.count(whole) > 1
    ]:
        raise RunFolderError(f"{twice[-1]}: given twice")
    depth = 1  # parent folders tell runs of one name apart
    while len({folder.parts[-depth:] for folder in resolved}) < len(resolved):
        depth += 1
    runs = [
        _load_run(folder, "/".join(whole.parts[-depth:]))
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
            f"{run.evaluation}: measures another training than {run.final}; run `scale evaluate` again"
        )
    config, model_config = (
        load_config(run.final / "scale.yaml"),
        read_json(run.final / "config.json"),
    )
    return ComparedRun(
        name, folder, config, report, BaseRecord.load(run.final), model_config, Cost.load(run.final)
    )


def _check_comparable(first: ComparedRun, other: ComparedRun) -> None:
    both = f"{first.folder} and {other.folder}"
    if first.base.content_sha256 != other.base.content_sha256:
        names = " and ".join(
            f"{run.base.name}{f' in {quantised}' if (quantised := run.config.model.quantisation) else ''}"
            for run in (first, other)
        )
        raise RunFolderError(f"runs on different base models cannot be compared: {both} ({names})")
    measured = [{corpus.name: corpus for corpus in run.report.corpora} for run in (first, other)]
    if odd := sorted(measured[0].keys() ^ measured[1].keys()):
        raise RunFolderError(
            f"runs must be evaluated on the same corpora: only one of {both} has {odd[0]}"
        )
    for name, one in measured[0].items():
        same = measured[1][name]
        for key in ("language", "role", "num_documents", "num_bytes", "num_base_tokens"):
            before, now = getattr(one, key), getattr(same, key)
            if before != now:
                found = f"{name} has {key} {before} and {now}"
                raise RunFolderError(
                    f"runs must be evaluated on the same corpora: {found} in {both}"
                )
        before, now = (corpus.heads["base"].nats_per_token for corpus in (one, same))
        if before is None or now is None:
            continue
        if abs(before - now) > _SAME_BASE_LOSS * abs(before):
            raise RunFolderError(
                f"runs must be evaluated with the same settings: on {name} the base has {before:.4f} and {now:.4f} "
                f"nats/token in {both} (is evaluation.sequence_length the same?)"
            )
    for benchmark in other.report.benchmarks:
        same_one = first.report.benchmark(benchmark.name)
        if same_one is not None and same_one.num_items != benchmark.num_items:
            found = f"{benchmark.name} has {same_one.num_items} and {benchmark.num_items}"
            raise RunFolderError(f"runs must be evaluated on the same items: {found} in {both}")


def option_of(run: ComparedRun, head: str) -> Option:
    report, method = run.report, run.method.definition
    label, served, passes, num_models = run.name, "alone", "1", 1
    if head != "trained" and method.widens:
        served, passes = f"routed, {head}", run.passes
        if head != report.served:
            label = f"{run.name}, {'posterior' if method.routes else 'routed'}"
    elif head != "trained":
        label, served, passes, num_models = f"{run.name} + base", "beside the base, mixed", "2", 2
    lost, change = (
        mean_interval(
            [corpus.heads[head].bits_per_byte_difference for corpus in report.with_role(role)]
        )
        for role in ROLES
    )
    share = None if head == "trained" else report.base_share_by_language(head)
    return Option(run, head, label, served, num_models, passes, lost, -change, share)


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of differences measured on different corpora, with its interval.

    The corpora are independent samples, so the arms of their intervals add as the square root of a sum of squares.
    The mean has no value if a part is not finite, and no interval if a part has none.
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


def front(options: Sequence[Option], most_models: int) -> list[Option]:
    """Return options of at most `most_models` models that neither another one nor the base beats, least loss first."""
    shown = [option for option in options if option.num_models <= most_models and option.is_finite]
    places: list[Any] = [(option.lost.value, option.gained.value) for option in shown]

    def is_beaten(lost: float, gained: float) -> bool:
        others = [place for place in [*places, (0.0, 0.0)] if place != (lost, gained)]
        return any(less <= lost and more >= gained for less, more in others)

    in_order = sorted(zip(places, shown, strict=True), key=lambda pair: pair[0])
    return [option for place, option in in_order if not is_beaten(*place)]


def side_names(report: Report) -> tuple[str, str]:
    """Return the names of the two sides: `forgetting of English`, `gain in Korean`."""
    kept, taught = (
        " and ".join(
            dict.fromkeys(language_name(corpus.language) for corpus in report.with_role(role))
        )
        for role in ROLES
    )
    return f"forgetting of {kept or 'the old'}", f"gain in {taught or 'the new'}"
