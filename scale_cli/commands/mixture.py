"""The verb `scale mixture`: how much new text a run can take before it forgets more than a tolerance.

One run for each share of new text (`scale sweep`), and where several budgets are asked for each of them; a law fitted
to what they lose and learn, its prediction of a share, and a longer budget, that none of them had, and that measured
beside it. A budget's run is one of its own, with its own schedule. What is finished is not run again.

At one budget the law is L(R) = a R^s + b (CMR, arXiv 2407.17467). Old text has a > 0 and s > 0, new text a > 0 and
s < 0; starts of either sign are tried for both. At several, of one model, L(r, D) = E + B r^h / D^b + C / (r + e)^g
(D-CPT, arXiv 2406.01375, its A/N^a being part of E), where r is the share of the corpus's own role, old or new, and D
counts steps: what a step has of tokens is a factor of B. Exponents are above 0 and B and C of either sign, for what is
forgotten rises with D. Both are fitted by Huber's loss of the difference of logarithms and L-BFGS from many starts
(Chinchilla, arXiv 2203.15556). Of the second some starts are the exponents' own least squares, E, B and C being solved
for, since its valleys are narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import log as natural_log
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, minimize
from scipy.special import huber

from scale_cli.commands.sweep import Trial, sweep
from scale_cli.config.load import Grid, Values, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.report import Table, number, percent
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.layout import RunFolder

_TITLES = ("share of new text", "base's text, bits/byte lost", "by the law", "new text, bits/byte", "by the law")
_NEAR = 0.01  # a share that is no other
Array = npt.NDArray[np.float64]
_HUBER = 1e-3  # of the difference of logarithms; a larger one counts linearly
_EXPONENTS = [sign * exponent for exponent in np.geomspace(0.02, 16.0, 30) for sign in (1, -1)]
_REFINED = 8  # of the starts, those that are nearest already
_LEAST = 1e-12
_PROJECTED = 6  # of the starts of a law with a budget
_RANGES = {"h": (0.05, 8.0, 6), "b": (0.02, 4.0, 8), "e": (0.003, 1.0, 4), "g": (0.02, 8.0, 6)}  # and how many starts
# Where too few runs cannot tell: two budgets leave b open (this is Chinchilla's), three shares e beside C and g.
_ASSUMED = {"b": 0.28, "e": 0.01}
Curve = Callable[[Array], tuple[Array, Array]]  # parameters to losses, and to the gradient of each


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
        """Return the law in figures."""
        return f"{self.a:.4g} R^{self.s:.4g} + {self.b:.4g}"

    def largest_ratio(self, loss: float) -> float | None:
        """Return the largest share at which a loss that rises with it is no more than this; None where none is."""
        if self.at(1.0) <= loss:
            return 1.0
        above = (loss - self.b) / self.a if self.a else -1.0
        if self.a * self.s <= 0 or above <= 0:
            return None
        return float(above ** (1.0 / self.s))


@dataclass(frozen=True)
class BudgetLaw:
    """A loss by the share of the corpus's own role and the steps of a run."""

    E: float
    B: float
    h: float
    b: float
    C: float
    e: float
    g: float
    assumed: tuple[str, ...]  # of these, what the runs were too few to tell

    def at(self, share: float, steps: float) -> float:
        """Return the loss at a share from 0 to 1, after so many steps."""
        return float(self.E + self.B * share**self.h / steps**self.b + self.C / (share + self.e) ** self.g)

    def formula(self) -> str:
        """Return the law in figures."""
        by_budget = f"{self.B:+.4g} r^{self.h:.4g} / D^{self.b:.4g}"
        assumed = f" ({' and '.join(self.assumed)} assumed: too few runs to tell)" if self.assumed else ""
        return f"{self.E:.4g} {by_budget} {self.C:+.4g} / (r + {self.e:.4g})^{self.g:.4g}{assumed}"

    def least_share(self, loss: float, steps: float) -> float | None:
        """Return the least share from which on, up to all, the loss is no more than this; None where there is none."""
        least = None
        for share in np.linspace(1.0, 0.0, 1001):
            if self.at(share, steps) > loss:
                break
            least = float(share)
        return least


def fit_power_law(ratios: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Return the law that is nearest to some losses, all above 0, at three shares or more."""
    assert len(ratios) == len(losses) >= 3 and min(losses) > 0, "three numbers are fitted"
    shares = np.array(ratios)
    starts = []
    for exponent in _EXPONENTS:
        factor, rest = np.polyfit(shares**exponent, losses, 1)
        scale = np.array([max(abs(factor), _LEAST), 1.0, max(abs(rest), np.mean(losses))])
        starts.append((np.array([factor, exponent, rest]), scale))

    def curve(parameters: Array) -> tuple[Array, Array]:
        a, s, b = parameters
        powers = shares ** np.clip(s, -50.0, 50.0)
        return a * powers + b, np.array([powers, a * powers * np.log(shares), np.ones_like(shares)])

    return PowerLaw(*_nearest(curve, losses, starts, [(-np.inf, np.inf)] * 3))


def fit_budget_law(shares: Sequence[float], steps: Sequence[int], losses: Sequence[float]) -> BudgetLaw:
    """Return the law that is nearest to some losses, all above 0, at three shares or more of two budgets or more."""
    assert len(set(shares)) >= 3 and len(set(steps)) >= 2 and min(losses) > 0, "what is not assumed is fitted"
    assumed = {name for name, few in (("b", len(set(steps)) == 2), ("e", len(set(shares)) == 3)) if few}
    fitted = [name for name in _RANGES if name not in assumed]
    r, longest = np.array(shares), max(steps)
    D, log_r = np.array(steps) / longest, np.log(np.maximum(r, _LEAST))

    def exponents(parameters: Array) -> dict[str, float]:
        return _ASSUMED | dict(zip(fitted, map(float, parameters[3:]), strict=True))

    def curve(parameters: Array) -> tuple[Array, Array]:
        (E, B, C), of = parameters[:3], exponents(parameters)
        by_budget, by_share = r ** of["h"] * D ** -of["b"], (r + of["e"]) ** -of["g"]
        gradients = {
            "h": B * by_budget * log_r,
            "b": -B * by_budget * np.log(D),
            "e": -C * of["g"] * by_share / (r + of["e"]),
            "g": -C * by_share * np.log(r + of["e"]),
        }
        linear = [np.ones_like(r), by_budget, by_share]
        return E + B * by_budget + C * by_share, np.array([*linear, *(gradients[name] for name in fitted)])

    def projected(logs: Array) -> tuple[Array, Array]:
        """Return E, B and C for the logarithms of some exponents by least squares, and what is left of the losses."""
        terms = curve(np.array([0.0, 0.0, 0.0, *np.exp(logs)]))[1][:3] / losses
        linear = np.linalg.lstsq(terms.T, np.ones_like(r))[0]
        return linear, linear @ terms - 1.0

    def left(logs: Array) -> Array:
        return projected(logs)[1]

    lows, highs = np.log([_RANGES[name][:2] for name in fitted]).T
    grid = [np.clip(logs, lows, highs) for logs in product(*(np.log(np.geomspace(*_RANGES[name])) for name in fitted))]
    grid.sort(key=lambda logs: np.square(left(logs)).sum())
    nearer = [
        least_squares(left, logs, bounds=(lows, highs), xtol=1e-12, ftol=1e-12, gtol=1e-12).x
        for logs in grid[:_PROJECTED]
    ]
    starts = []
    for logs in [*nearer, *grid]:
        parameters = np.array([*projected(logs)[0], *np.exp(logs)])
        starts.append((parameters, np.maximum(np.abs(parameters), _LEAST)))
    found = _nearest(curve, losses, starts, [(-np.inf, np.inf)] * 3 + [_RANGES[name][:2] for name in fitted])
    (E, B, C), of = found[:3], exponents(np.array(found))
    return BudgetLaw(E, B * longest ** of["b"], of["h"], of["b"], C, of["e"], of["g"], tuple(sorted(assumed)))


def _nearest(
    curve: Curve,
    losses: Sequence[float],
    starts: Sequence[tuple[Array, Array]],
    bounds: Sequence[tuple[float, float]],
) -> list[float]:
    """Return the parameters of the curve that is nearest to some losses; of each start, the units it moves in too."""
    logs = np.log(losses)
    tried = [(_distance(start / scale, scale, curve, logs)[0], tuple(start), tuple(scale)) for start, scale in starts]
    found = []
    for _, start, units in sorted(tried)[:_REFINED]:
        scale, begun = np.array(units), np.array(start) / np.array(units)
        within = [(low / unit, high / unit) for (low, high), unit in zip(bounds, units, strict=True)]
        end = minimize(_distance, begun, args=(scale, curve, logs), method="L-BFGS-B", jac=True, bounds=within)
        found.append((float(end.fun), [float(value) for value in end.x * scale]))
    return min(found)[1]


def _distance(scaled: Array, scale: Array, curve: Curve, logs: Array) -> tuple[float, Array]:
    """Return how far a curve's logarithms are from some, in units of what counts in full, and the gradient of that."""
    losses, gradients = curve(scaled * scale)
    fitted = np.maximum(losses, _LEAST)
    away = np.log(fitted) - logs
    distance = huber(_HUBER, away).sum() / _HUBER**2
    slopes = np.clip(away, -_HUBER, _HUBER) / fitted / _HUBER**2
    return float(distance), gradients @ slopes * scale


Law = PowerLaw | BudgetLaw


@dataclass(frozen=True)
class Point:
    """A share of new text and a budget, and what a run of them came to on held-out text."""

    ratio: float
    steps: int
    lost: float  # bits/byte beside the base, on what it was to keep
    kept: float  # bits/byte on the same
    learned: float  # bits/byte on what it was to learn


@dataclass(frozen=True)
class Mixture:
    """What was measured and what the laws say, of the head that is served."""

    folder: Path  # of the report
    points: list[Point]  # that the laws are fitted to
    kept: Law
    learned: Law
    tolerance: float  # bits/byte that may be lost
    # At which the law of what is kept loses no more, at the budget that is predicted; None: at none.
    largest_ratio: float | None
    unseen: Point  # which the laws have not seen

    @property
    def base(self) -> float:
        """The base's own bits/byte on what is to be kept."""
        return self.points[0].kept - self.points[0].lost

    def lines(self) -> list[str]:
        return [*self.table().lines(), *self.sentences(), f"report: {self.folder / 'report.md'}"]

    def table(self) -> Table:
        """Return every run, measured beside predicted; the last is the one that was not fitted."""
        rows = []
        for point in [*sorted(self.points, key=lambda point: (point.steps, point.ratio)), self.unseen]:
            kept, learned = self.predicted(point)
            name = f"{point.ratio:.3g}{' (not fitted)' if point is self.unseen else ''}"
            losses = number(point.lost, 4, "+"), number(kept - self.base, 4, "+")
            rows.append([str(point.steps), name, *losses, number(point.learned, 4), number(learned, 4)])
        if isinstance(self.kept, BudgetLaw):
            return Table(("steps", *_TITLES), rows, "rlrrrr")
        return Table(_TITLES, [row[1:] for row in rows], "lrrrr")

    def sentences(self) -> list[str]:
        """Return the laws, what they allow, and how far off they are."""
        steps = f" in {self.unseen.steps} steps" if isinstance(self.kept, BudgetLaw) else ""
        allowed = "at no share" if self.largest_ratio is None else f"up to a share of {self.largest_ratio:.3g}"
        errors = zip(self.errors(), (self.unseen.kept, self.unseen.learned), strict=True)
        of_old, of_new = (
            f"{off:+.4f} bits/byte ({off * natural_log(2):+.4f} nats/byte, {percent(off / measured)}; "
            f"{off + measured:.4f} predicted, {measured:.4f} measured)"
            for off, measured in errors
        )
        return [
            f"base's text: bits/byte = {self.kept.formula()}",
            f"new text: bits/byte = {self.learned.formula()}",
            f"no more than {self.tolerance:g} bits/byte are lost{steps} {allowed} of new text, by the law",
            f"at {self.unseen.ratio:.3g}{steps}, which it has not seen, the law is off by {of_old} on the base's text "
            f"and {of_new} on the new one",
        ]

    def predicted(self, point: Point) -> tuple[float, float]:
        """Return what the laws say of a run, of old text and of new."""
        return _at(self.kept, 1 - point.ratio, point), _at(self.learned, point.ratio, point)

    def errors(self) -> tuple[float, float]:
        """Return what the laws predict too much at the run that they have not seen, of old text and of new."""
        kept, learned = self.predicted(self.unseen)
        return kept - self.unseen.kept, learned - self.unseen.learned


def _at(law: Law, share: float, point: Point) -> float:
    return law.at(share, point.steps) if isinstance(law, BudgetLaw) else law.at(point.ratio)


def mixture(
    path: Path,
    overrides: Sequence[str],
    ratios: Sequence[float],
    tolerance: float,  # bits/byte that may be lost of the base's text
    log: Callable[[str], None],
    steps: Sequence[float] = (),  # budgets, each of which every share is run for; none: the config's own
    predict_steps: int | None = None,  # a longer budget, to predict and to measure
) -> Mixture:
    """Run a config at some shares of new text, for some budgets, fit the laws, and measure what they predict."""
    config = load_config(path, list(overrides))
    _check(config, ratios, steps, predict_steps)
    if predict_steps is not None:  # what is wrong with it is said before anything is run
        load_config(path, [*overrides, f"train.max_steps={predict_steps}"])
    budgets: dict[int, Values] = {int(budget): (f"train.max_steps={int(budget)}",) for budget in steps}
    budgets = budgets or {config.train.max_steps: ()}
    runs = {(r, budget): weights_at(config, r) + of for budget, of in budgets.items() for r in ratios}
    points = _measured(path, overrides, runs, log)
    kept, learned = _fitted(points)
    last = predict_steps or config.train.max_steps
    largest = _largest_ratio(kept, points[0].kept - points[0].lost + tolerance, last)
    ratio = unseen_ratio(ratios, largest)
    # All of them again, so that the sweep's report holds all; those that are finished are not run again.
    of_last = (f"train.max_steps={last}",) if steps else ()
    *_, unseen = _measured(path, overrides, {**runs, (ratio, last): weights_at(config, ratio) + of_last}, log)
    made = Mixture(config.output_dir / "mixture", points, kept, learned, tolerance, largest, unseen)
    with new_folder(made.folder) as partial:
        report = {**asdict(made), "predicted": made.predicted(unseen), "errors": made.errors()}
        del report["folder"]
        write_json(partial / "report.json", report)
        said = "\n".join(f"- {sentence}" for sentence in made.sentences())
        write_text(partial / "report.md", f"# Mixture\n\n{made.table().markdown()}\n\n{said}\n")
    return made


def _check(config: RunConfig, ratios: Sequence[float], steps: Sequence[float], predict_steps: int | None) -> None:
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
    if bool(steps) != (predict_steps is not None):
        raise ConfigError("--steps and --predict-steps: give both, or neither for the config's train.max_steps")
    if predict_steps is None:
        return
    if len(set(steps)) < 2 or min(steps) < 1 or any(budget != int(budget) for budget in steps):
        raise ConfigError("--steps: give two budgets or more, in whole steps above 0")
    if predict_steps <= max(steps):
        raise ConfigError(f"--predict-steps {predict_steps}: give more than the {max(steps):g} of --steps, to foretell")


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


def _fitted(points: list[Point]) -> tuple[Law, Law]:
    ratios, budgets = [point.ratio for point in points], [point.steps for point in points]
    kept, learned = [point.kept for point in points], [point.learned for point in points]
    if len(set(budgets)) == 1:
        return fit_power_law(ratios, kept), fit_power_law(ratios, learned)
    old = [1 - ratio for ratio in ratios]
    return fit_budget_law(old, budgets, kept), fit_budget_law(ratios, budgets, learned)


def _largest_ratio(kept: Law, loss: float, steps: int) -> float | None:
    if isinstance(kept, PowerLaw):
        return kept.largest_ratio(loss)
    least = kept.least_share(loss, steps)
    return None if least is None else 1 - least


def _measured(
    path: Path, overrides: Sequence[str], runs: dict[tuple[float, int], Values], log: Callable[[str], None]
) -> list[Point]:
    trials = {trial.values: trial for trial in sweep(path, Grid([*overrides], [*runs.values()]), None, log).trials}
    return [_point(*place, trials[values]) for place, values in runs.items()]


def _point(ratio: float, steps: int, trial: Trial) -> Point:
    figures = trial.retention_bits_per_byte_lost, trial.retention_bits_per_byte, trial.bits_per_byte
    if trial.failure is not None or None in figures:
        raise TrainingError(f"{trial.folder}: {trial.failure or 'its losses are not finite'}, so no law can be fitted")
    lost, kept, learned = (figure for figure in figures if figure is not None)
    return Point(ratio, steps, lost, kept, learned)
