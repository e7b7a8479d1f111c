"""How a loss depends on the share of new text: L(R) = a R^s + b (CMR, arXiv 2407.17467), fitted to a few runs.

Huber's loss of the difference of logarithms, by L-BFGS from many starts, as laws of scaling are fitted (Chinchilla,
arXiv 2203.15556). Old text has a > 0 and s > 0, new text a > 0 and s < 0; starts of either sign are tried for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import huber

Array = npt.NDArray[np.float64]
_HUBER = 1e-3  # of the difference of logarithms; a larger one counts linearly
_EXPONENTS = [sign * exponent for exponent in np.geomspace(0.02, 16.0, 30) for sign in (1, -1)]
_REFINED = 3  # of the starts, those that are nearest already
_LEAST = 1e-12


@dataclass(frozen=True)
class PowerLaw:
    """A loss by the share of new text."""

    a: float
    s: float
    b: float

    def at(self, ratio: float) -> float:
        """Return the loss at a share above 0."""
        return float(self.a * ratio**self.s + self.b)

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
    shares, logs = np.array(ratios), np.log(losses)
    starts = []
    for exponent in _EXPONENTS:
        factor, rest = np.polyfit(shares**exponent, losses, 1)
        scale = np.array([max(abs(factor), _LEAST), 1.0, max(abs(rest), np.mean(losses))])
        start = np.array([factor, exponent, rest]) / scale
        starts.append((_distance(start, scale, shares, logs)[0], tuple(start), tuple(scale)))
    found = []
    for _, nearest, units in sorted(starts)[:_REFINED]:
        fitted = minimize(_distance, nearest, args=(np.array(units), shares, logs), jac=True, method="L-BFGS-B")
        found.append((float(fitted.fun), tuple(float(value) for value in fitted.x * units)))
    return PowerLaw(*min(found)[1])


def _distance(scaled: Array, scale: Array, shares: Array, logs: Array) -> tuple[float, Array]:
    """Return how far a law's logarithms are from some, in units of what counts in full, and the gradient of that."""
    a, s, b = scaled * scale
    powers = shares ** np.clip(s, -50.0, 50.0)
    fitted = np.maximum(a * powers + b, _LEAST)
    away = np.log(fitted) - logs
    distance = huber(_HUBER, away).sum() / _HUBER**2
    slopes = np.clip(away, -_HUBER, _HUBER) / fitted / _HUBER**2
    gradient = np.array([slopes @ powers, slopes @ (a * powers * np.log(shares)), slopes.sum()])
    return float(distance), gradient * scale
