"""Figures as text: digits, signs, units, intervals, and what is written where there is no figure."""

from __future__ import annotations

from dataclasses import dataclass

NOT_FINITE, NOT_RECORDED, DASH = "not finite", "not recorded", "—"
NO_DIFFERENCE = "no difference shown"
# p-values, adjusted by Holm's method, from here on show nothing.
SIGNIFICANCE = 0.05
# Beyond these, digits are noise: of a perplexity, and of nats lost by one document.
_LARGE, _LONG_DOCUMENT = 1e6, 100.0
_LEAST_SHOWN = 0.0005
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    value: float | None  # None where it is not finite
    low: float | None  # None where there is one document, or no finite value
    high: float | None

    @property
    def ends(self) -> list[float]:
        return [end for end in (self.value, self.low, self.high) if end is not None]

    def __neg__(self) -> Interval:
        return Interval(*(None if end is None else -end + 0.0 for end in (self.value, self.high, self.low)))


NO_INTERVAL = Interval(None, None, None)


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Return a figure, with `sign` "+" as a difference; nothing is written as minus zero."""
    if value is None:
        return NOT_FINITE
    text = f"{value:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0.0 else text


def bounds(interval: Interval, digits: int = 3, sign: str = "+") -> str:
    """Return the two ends of an interval in brackets; nothing where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{number(interval.low, digits, sign)}, {number(interval.high, digits, sign)}]"


def with_interval(interval: Interval, digits: int = 3) -> str:
    """Return a difference with its interval: +0.001 [+0.001, +0.002]."""
    return f"{number(interval.value, digits, '+')} {bounds(interval, digits)}".strip()


def in_points(share: Interval) -> Interval:
    """Return an accuracy, or a difference of two, in percentage points."""
    return Interval(*(None if end is None else 100 * end for end in (share.value, share.low, share.high)))


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def quantity(value: float | None, unit: str = "") -> str:
    """Return a figure in three digits with its SI prefix: 9.03 GFLOP, 263 k, 42; or that there is no record of it."""
    if value is None:
        return NOT_RECORDED
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if abs(value) < 999.5 or prefix == "Z":
            break
        value /= 1000
    whole = not prefix and value == int(value)
    digits = 0 if whole or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def perplexity(value: float | None) -> str:
    """Return a perplexity, which has no upper end, with as many digits as can be read."""
    if value is None:
        return NOT_FINITE
    if value < _LARGE:
        return f"{value:,.2f}"
    digits, exponent = f"{value:.1e}".split("e+")
    return f"{digits} × 10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def worst_document(value: float | None) -> str:
    """Return the most nats that a document lost; below zero it gained them, and no document lost any."""
    if value is None:
        return NOT_FINITE
    digits = 3 if abs(value) < _LONG_DOCUMENT else 0
    return "0.000" if abs(value) < _LEAST_SHOWN else f"{value:+,.{digits}f}"


def p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def shows_difference(p_holm: float | None) -> bool:
    return p_holm is not None and p_holm < SIGNIFICANCE


def difference_in_words(difference: Interval, p_holm: float | None) -> str:
    """Return in a word what the test says of a difference in accuracy."""
    if difference.value is None or p_holm is None:
        return "not tested"
    if not shows_difference(p_holm):
        return NO_DIFFERENCE
    return "better" if difference.value > 0 else "worse"
