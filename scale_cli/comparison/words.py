"""Figures as text: differences with their intervals, counts, shares, bytes."""

from __future__ import annotations

from collections.abc import Iterable

from scale_cli.evaluation.statistics import Interval

NOT_RECORDED = "not recorded"
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNT_UNITS = ((1e9, " B"), (1e6, " M"), (1e3, " k"))


def signed(value: float | None, digits: int = 4) -> str:
    """Return a difference with its sign, or what it is instead of one; nothing is written as minus zero."""
    if value is None:
        return "not finite"
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0.0 else text.replace("-", "−")


def interval_text(interval: Interval, digits: int = 4) -> str:
    """Return the two ends of an interval in brackets; nothing where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{signed(interval.low, digits)}, {signed(interval.high, digits)}]"


def digits_for(differences: Iterable[Interval]) -> int:
    """Return to how many decimals a column of differences is shown: four, or fewer where all of them are large."""
    sizes = [abs(interval.value) for interval in differences if interval.value is not None]
    least = min(sizes, default=0.0)
    return 4 if least < 1.0 else 3 if least < 10.0 else 2


def with_interval(interval: Interval, digits: int = 4) -> str:
    """Return a difference and its interval on one line."""
    return f"{signed(interval.value, digits)} {interval_text(interval, digits)}".strip()


def points(share: float | None, sign: str = "") -> str:
    """Return an accuracy in percent, or with `sign` "+" a difference of two in points."""
    if share is None:
        return "not finite"
    text = f"{100 * share:{sign}.1f}"
    return text[1:] if sign and float(text) == 0.0 else text.replace("-", "−")


def points_interval(interval: Interval, sign: str = "") -> str:
    """Return the ends of an accuracy's interval in brackets; nothing where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{points(interval.low, sign)}, {points(interval.high, sign)}]"


def short_count(value: float | None) -> str:
    """Return a count in three digits: 263 k, 1.24 M."""
    return NOT_RECORDED if value is None else _with_unit(value, _COUNT_UNITS)


def short_bytes(value: float | None) -> str:
    """Return a size in memory in three digits: 812 MB, 1.24 GB."""
    return NOT_RECORDED if value is None else _with_unit(value, tuple((size, f" {unit}") for size, unit in _BYTE_UNITS))


def rate(value: float | None) -> str:
    """Return tokens a second."""
    return NOT_RECORDED if value is None else f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f} %"


def times_base(parameters: int | None, parameters_of_base: int | None) -> str:
    """Return how many times the base's parameters are held."""
    if parameters is None or not parameters_of_base:
        return NOT_RECORDED
    return f"{parameters / parameters_of_base:.2f} ×"


def tick_count(value: float) -> str:
    """Return a count for an axis: 0, 500, 20k, 1.5M."""
    for size, unit in _COUNT_UNITS:
        if value >= size:
            return f"{value / size:g}{unit.strip()}"
    return f"{value:g}"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:,.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"
