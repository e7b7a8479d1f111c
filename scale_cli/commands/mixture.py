"""The verb `scale mixture`: how much new text a run can take before it forgets more than a tolerance (CMR).

One run for each share of new text (`scale sweep`), a law fitted to what they lose and learn, its prediction of a share
that none of them had, and that share measured beside it. What is finished is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from scale_cli.commands.sweep import Trial, sweep
from scale_cli.config.grid import Grid, Values
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.planning.mixture_law import PowerLaw, fit_power_law
from scale_cli.report.numbers import number
from scale_cli.report.tables import Table
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.layout import RunFolder

_TITLES = ("share of new text", "base's text, bits/byte lost", "by the law", "new text, bits/byte", "by the law")
_NEAR = 0.01  # a share that is no other


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

    points: list[Point]  # that the laws are fitted to
    kept: PowerLaw
    learned: PowerLaw
    tolerance: float  # bits/byte that may be lost
    largest_ratio: float | None  # at which the law of what is kept loses no more; None: at none
    unseen: Point  # which the laws have not seen

    @property
    def base(self) -> float:
        """The base's own bits/byte on what is to be kept."""
        return self.points[0].kept - self.points[0].lost

    def table(self) -> Table:
        """Return every share, measured beside predicted; the last is the one that was not fitted."""
        rows = []
        for point in [*sorted(self.points, key=lambda point: point.ratio), self.unseen]:
            lost, learned = self.kept.at(point.ratio) - self.base, self.learned.at(point.ratio)
            name = f"{point.ratio:.3g}{' (not fitted)' if point is self.unseen else ''}"
            cells = [number(point.lost, 4, "+"), number(lost, 4, "+"), number(point.learned, 4), number(learned, 4)]
            rows.append([name, *cells])
        return Table(_TITLES, rows, "lrrrr")

    def sentences(self) -> list[str]:
        """Return the laws, what they allow, and how far off they are."""
        error, of_new = self.errors()
        allowed = "at no share" if self.largest_ratio is None else f"up to a share of {self.largest_ratio:.3g}"
        return [
            *(
                f"{name}: bits/byte = {law.a:.4g} R^{law.s:.4g} + {law.b:.4g}"
                for name, law in (("base's text", self.kept), ("new text", self.learned))
            ),
            f"no more than {self.tolerance:g} bits/byte are lost {allowed} of new text, by the law",
            f"at {self.unseen.ratio:.3g}, which it has not seen, the law is off by {error:+.4f} bits/byte on the "
            f"base's text and {of_new:+.4f} on the new one",
        ]

    def errors(self) -> tuple[float, float]:
        """Return what the laws predict too much at the share that they have not seen, of old text and of new."""
        ratio = self.unseen.ratio
        return self.kept.at(ratio) - self.unseen.kept, self.learned.at(ratio) - self.unseen.learned


@dataclass(frozen=True)
class MixtureSummary:
    """What came out, for the terminal."""

    folder: Path
    mixture: Mixture

    def lines(self) -> list[str]:
        """Return a table, the laws, and where the report lies."""
        return [*self.mixture.table().lines(), *self.mixture.sentences(), f"report: {self.folder / 'report.md'}"]


def mixture(
    path: Path, overrides: Sequence[str], ratios: Sequence[float], tolerance: float, log: Callable[[str], None]
) -> MixtureSummary:
    """Run a config at some shares of new text, fit the laws, and measure what they predict.

    Raises:
        ConfigError: fewer than three shares, or the config has nothing to mix or nothing to measure with.
        TrainingError: a run stopped.
    """
    config = load_config(path, list(overrides))
    _check(config, ratios)
    weights = {ratio: weights_at(config, ratio) for ratio in ratios}
    points = _measured(path, overrides, weights, log)
    kept, learned = (fit_power_law([p.ratio for p in points], [getattr(p, of) for p in points]) for of in _FITTED)
    largest = kept.largest_ratio(points[0].kept - points[0].lost + tolerance)
    ratio = unseen_ratio(ratios, largest)
    # All of them again, so that the sweep's report holds all; those that are finished are not run again.
    *_, unseen = _measured(path, overrides, {**weights, ratio: weights_at(config, ratio)}, log)
    made = Mixture(points, kept, learned, tolerance, largest, unseen)
    folder = config.output_dir / "mixture"
    with new_folder(folder) as partial:
        write_json(partial / "report.json", {**asdict(made), "errors": made.errors()})
        said = "\n".join(f"- {sentence}" for sentence in made.sentences())
        write_text(partial / "report.md", f"# Mixture\n\n{made.table().markdown()}\n\n{said}\n")
    return MixtureSummary(folder, made)


_FITTED = ("kept", "learned")


def _check(config: RunConfig, ratios: Sequence[float]) -> None:
    if len(set(ratios)) < 3 or min(ratios) <= 0 or max(ratios) > 1:
        raise ConfigError("--ratios: give three shares of new text or more, above 0 and at most 1")
    if not any(source.role == "replay" and source.weight for source in config.corpus.sources):
        raise ConfigError(
            "corpus.sources: none of the role replay has a weight, so there is nothing to mix new text with"
        )
    if config.method.distils and max(ratios) == 1:
        raise ConfigError(
            "--ratios: 1 leaves no replay, on which alone method.distillation.weight acts; give shares below 1, as "
            "0.33,0.5,0.75,0.9"
        )
    if config.corpus.stages:
        raise ConfigError("corpus.stages: they give the weights that are to be found; leave them out")
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
    path: Path, overrides: Sequence[str], weights: dict[float, Values], log: Callable[[str], None]
) -> list[Point]:
    trials = {trial.values: trial for trial in sweep(path, Grid([*overrides], [*weights.values()]), None, log).trials}
    return [_point(ratio, trials[values]) for ratio, values in weights.items()]


def _point(ratio: float, trial: Trial) -> Point:
    figures = trial.retention_bits_per_byte_lost, trial.retention_bits_per_byte, trial.bits_per_byte
    if trial.failure is not None or None in figures:
        raise TrainingError(f"{trial.folder}: {trial.failure or 'its losses are not finite'}, so no law can be fitted")
    lost, kept, learned = (figure for figure in figures if figure is not None)
    return Point(ratio, lost, kept, learned)
