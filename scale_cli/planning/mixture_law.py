"""How a loss depends on a mixture, fitted to a few runs: on its share of new text, or on a share and a budget.

At one budget L(R) = a R^s + b (CMR, arXiv 2407.17467). Old text has a > 0 and s > 0, new text a > 0 and s < 0; starts
of either sign are tried for both. At several, of one model, L(r, D) = E + B r^h / D^b + C / (r + e)^g (D-CPT, arXiv
2406.01375, its A/N^a being part of E), where r is the share of the corpus's own role, old or new, and D counts steps:
what a step has of tokens is a factor of B. Exponents are above 0 and B and C of either sign, for what is forgotten
rises with D. Both by Huber's loss of the difference of logarithms and L-BFGS from many starts, as laws of scaling are
fitted (Chinchilla, arXiv 2203.15556); of the second some starts are the exponents' own least squares, E, B and C being
solved for, since its valleys are narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, minimize
from scipy.special import huber

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
