"""The verb `scale mixture`: how much new text a run can take before it forgets more than a tolerance.

One run for each share R of new text (`scale sweep`), a law fitted to what they lose and learn, its prediction of a
share that none of them had, and that measured beside it. What is finished is not run again.

The law is L(R) = a R^s + b (CMR, arXiv 2407.17467): old text has a > 0 and s > 0, new text a > 0 and s < 0. For an
exponent s the a and b of the least relative squares are solved for, so s alone is searched, of either sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from scale_cli.commands.sweep import Trial, sweep
from scale_cli.config.load import Grid, Values, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.report import Table, number, percent
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.layout import RunFolder

_TITLES = ("share of new text", "base's text, bits/byte lost", "by the law", "new text, bits/byte", "by the law")
_NEAR = 0.01  # a share that is no other
_LOGS = [float(log) for log in np.linspace(math.log(0.02), math.log(16.0), 30)]  # of exponents, to begin with


@dataclass(frozen=True)
class PowerLaw:
    """A loss by the share of new text."""

    a: float
    s: float
    b: float

    def at(self, ratio: float) -> float:
        """Return the loss at a share above 0."""
        return float(self.a * ratio**self.s + self.b)

    def formula(self) -> str:
        return f"{self.a:.4g} R^{self.s:.4g} + {self.b:.4g}"

    def largest_ratio(self, loss: float) -> float | None:
        """Return the largest share at which a loss that rises with it is no more than this; None where none is."""
        if self.at(1.0) <= loss:
            return 1.0
        above = (loss - self.b) / self.a if self.a else -1.0
        if self.a * self.s <= 0 or above <= 0:
            return None
        return float(above ** (1.0 / self.s))


def fit_power_law(ratios: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Return the law that is nearest to some losses, all above 0, at three shares or more."""
    assert len(ratios) == len(losses) >= 3 and min(losses) > 0, "three numbers are fitted"
    shares, inverse = np.array(ratios), 1.0 / np.array(losses)

    def solved(s: float) -> tuple[float, npt.NDArray[np.float64]]:
        """Return the relative squares that are left with an exponent, and its a and b."""
        terms = np.stack([shares**s, np.ones_like(shares)], axis=1) * inverse[:, None]
        linear = np.linalg.lstsq(terms, np.ones_like(shares))[0]
        return float(np.square(terms @ linear - 1.0).sum()), linear

    def left(log: float, sign: int) -> float:
        return solved(sign * math.exp(log))[0]

    found = []
    for sign in (1, -1):
        nearest = int(np.argmin([left(log, sign) for log in _LOGS]))
        around = _LOGS[max(nearest - 1, 0)], _LOGS[min(nearest + 1, len(_LOGS) - 1)]
        s = sign * math.exp(minimize_scalar(left, args=(sign,), bounds=around).x)
        least, (a, b) = solved(s)
        found.append((least, PowerLaw(float(a), s, float(b))))
    return min(found, key=lambda law: law[0])[1]


@dataclass(frozen=True)
class Point:
    """A share of new text, and what a run of it came to on held-out text."""

    ratio: float
    lost: float  # bits/byte beside the base, on what it was to keep
    kept: float  # bits/byte on the same
    learned: float  # bits/byte on what it was to learn


@dataclass(frozen=True)
class Mixture:
    """What was measured and what the laws say, of the head that is served."""

    folder: Path  # of the report
    points: list[Point]  # that the laws are fitted to
    kept: PowerLaw
    learned: PowerLaw
    tolerance: float  # bits/byte that may be lost
    largest_ratio: float | None  # at which the law of what is kept loses no more; None: at none
    unseen: Point  # which the laws have not seen

    def lines(self) -> list[str]:
        return [*self.table().lines(), *self.sentences(), f"report: {self.folder / 'report.md'}"]

    def table(self) -> Table:
        """Return every run, measured beside predicted; the last is the one that was not fitted."""
        rows, base = [], self.points[0].kept - self.points[0].lost
        for point in [*sorted(self.points, key=lambda point: point.ratio), self.unseen]:
            kept, learned = self.predicted(point)
            name = f"{point.ratio:.3g}{' (not fitted)' if point is self.unseen else ''}"
            losses = number(point.lost, 4, "+"), number(kept - base, 4, "+")
            rows.append([name, *losses, number(point.learned, 4), number(learned, 4)])
        return Table(_TITLES, rows, "lrrrr")

    def sentences(self) -> list[str]:
        """Return the laws, what they allow, and how far off they are."""
        allowed = "at no share" if self.largest_ratio is None else f"up to a share of {self.largest_ratio:.3g}"
        errors = zip(self.errors(), (self.unseen.kept, self.unseen.learned), strict=True)
        of_old, of_new = (f"{off:+.4f} bits/byte ({percent(off / measured)})" for off, measured in errors)
        return [
            f"base's text: bits/byte = {self.kept.formula()}",
            f"new text: bits/byte = {self.learned.formula()}",
            f"no more than {self.tolerance:g} bits/byte are lost {allowed} of new text, by the law",
            f"at {self.unseen.ratio:.3g}, which it has not seen, the law is off by {of_old} on the base's text "
            f"and {of_new} on the new one",
        ]

    def predicted(self, point: Point) -> tuple[float, float]:
        """Return what the laws say of a run, of old text and of new."""
        return self.kept.at(point.ratio), self.learned.at(point.ratio)

    def errors(self) -> tuple[float, float]:
        """Return what the laws predict too much at the run that they have not seen, of old text and of new."""
        kept, learned = self.predicted(self.unseen)
        return kept - self.unseen.kept, learned - self.unseen.learned


def mixture(
    path: Path,
    overrides: Sequence[str],
    ratios: Sequence[float],
    tolerance: float,  # bits/byte that may be lost of the base's text
    log: Callable[[str], None],
) -> Mixture:
    """Run a config at some shares of new text, fit the laws, and measure what they predict."""
    config = load_config(path, list(overrides))
    _check(config, ratios)
    runs = {ratio: weights_at(config, ratio) for ratio in ratios}
    points = _measured(path, overrides, runs, log)
    kept, learned = (
        fit_power_law([point.ratio for point in points], losses)
        for losses in ([point.kept for point in points], [point.learned for point in points])
    )
    largest = kept.largest_ratio(points[0].kept - points[0].lost + tolerance)
    ratio = unseen_ratio(ratios, largest)
    # All of them again, so that the sweep's report holds all; those that are finished are not run again.
    *_, unseen = _measured(path, overrides, {**runs, ratio: weights_at(config, ratio)}, log)
    made = Mixture(config.output_dir / "mixture", points, kept, learned, tolerance, largest, unseen)
    with new_folder(made.folder) as partial:
        report = {**asdict(made), "predicted": made.predicted(unseen), "errors": made.errors()}
        del report["folder"]
        write_json(partial / "report.json", report)
        said = "\n".join(f"- {sentence}" for sentence in made.sentences())
        write_text(partial / "report.md", f"# Mixture\n\n{made.table().markdown()}\n\n{said}\n")
    return made


def _check(config: RunConfig, ratios: Sequence[float]) -> None:
    if len(set(ratios)) < 3 or min(ratios) <= 0 or max(ratios) > 1:
        raise ConfigError("--ratios: give three shares of new text or more, above 0 and at most 1")
    if not any(source.weight for source in config.corpus.replay):
        raise ConfigError(
            "corpus.sources: none of the role replay has a weight, so there is nothing to mix new text with"
        )
    if config.method.distils and max(ratios) == 1:
        raise ConfigError(
            "--ratios: 1 leaves no replay, on which alone method.distillation.weight acts; give shares below 1, as "
            "0.33,0.5,0.75,0.9"
        )
    roles = {source.role for source in config.evaluation.perplexity}
    if missing := sorted({"acquisition", "retention"} - roles):
        raise ConfigError(f"evaluation.perplexity: has no corpus of role {missing[0]} to measure with")
    RunFolder(config.output_dir).check()


def weights_at(config: RunConfig, ratio: float) -> Values:
    """Return the overrides that make a share of the windows new text; within a role the sources' shares are kept."""
    sources = config.corpus.sources
    shares = {"new": ratio, "replay": 1.0 - ratio}
    sums = {role: sum(source.weight for source in sources if source.role == role) for role in shares}
    weights = [shares[source.role] * source.weight / (sums[source.role] or 1.0) for source in sources]
    return tuple(f"corpus.sources.{index}.weight={weight:.6g}" for index, weight in enumerate(weights))


def unseen_ratio(ratios: Sequence[float], largest: float | None) -> float:
    """Return a share to predict: the largest that is allowed, or where a run had that, one amid the widest gap."""
    known = sorted(set(ratios))
    if largest is not None and known[0] < largest < known[-1] and min(abs(largest - r) for r in known) > _NEAR:
        return round(largest, 3)
    below, above = max(pairwise(known), key=lambda pair: pair[1] - pair[0])
    return round((below + above) / 2, 3)


def _measured(
    path: Path, overrides: Sequence[str], runs: dict[float, Values], log: Callable[[str], None]
) -> list[Point]:
    trials = {trial.values: trial for trial in sweep(path, Grid([*overrides], [*runs.values()]), log).trials}
    return [_point(ratio, trials[values]) for ratio, values in runs.items()]


def _point(ratio: float, trial: Trial) -> Point:
    figures = trial.retention_bits_per_byte_lost, trial.retention_bits_per_byte, trial.bits_per_byte
    if trial.failure is not None or None in figures:
        raise TrainingError(f"{trial.folder}: {trial.failure or 'its losses are not finite'}, so no law can be fitted")
    lost, kept, learned = (figure for figure in figures if figure is not None)
    return Point(ratio, lost, kept, learned)
