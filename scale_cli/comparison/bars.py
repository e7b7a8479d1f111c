"""Rows of bars and dots: route shares per language, and what training cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scale_cli.comparison.options import Option
from scale_cli.comparison.palette import MARKERS
from scale_cli.comparison.runs import ComparedRun
from scale_cli.comparison.svg import Axis, Canvas, Point, shortened, text_width
from scale_cli.comparison.words import percent, rate, short_bytes, short_count
from scale_cli.evaluation.render import language_name

_ROW = 26.0
_SIZE = 12.0


def draw_shares(options: Sequence[Option], width: float) -> Canvas:
    """Draw, for every option that mixes two heads, the share of each language's tokens that the base head served.

    Args:
        options: that mix, each with a share for the same languages.
        width: of the figure, in pixels.
    """
    languages = list(options[0].base_share or {})
    labels = _label_width([option.label for option in options], width)
    names = [language_name(code) if width >= 600 else code for code in languages]
    column = max(60.0, 34 + max(text_width(name, _SIZE) for name in names))
    top, bottom = 30.0, 46.0
    canvas = Canvas(width, top + _ROW * len(options) + bottom)
    across = Axis(0.0, 1.0, labels + 12, width - column * len(languages) - 14)
    end = canvas.height - bottom
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.line([(across(share), top), (across(share), end)], "grid")
        if width >= 600 or share in (0.0, 0.5, 1.0):
            canvas.text((across(share), end + 16), f"{100 * share:.0f}", size=11, colour="muted", anchor="middle")
    under = "% of tokens served by the base head" if width >= 600 else "% served by the base head"
    canvas.text(((across.start + across.stop) / 2, end + 36), under, size=11.5, anchor="middle")
    for index, name in enumerate(names):
        x = width - column * (len(languages) - 1 - index)
        canvas.text((x, 16), name, size=_SIZE, anchor="end", style="strong")
        canvas.marker((x - text_width(name, _SIZE) - 10, 12), "circle", "ink", "paper" if index else "ink", radius=3.5)
    for index, option in enumerate(options):
        _draw_share_row(canvas, option, languages, across, top + _ROW * (index + 0.5), labels, column)
    return canvas


def _draw_share_row(
    canvas: Canvas, option: Option, languages: Sequence[str], across: Axis, y: float, labels: float, column: float
) -> None:
    shares, colour = option.base_share or {}, option.run.method.variant
    label = shortened(option.label, _SIZE, labels)
    canvas.text((labels, y + 4), label, size=_SIZE, anchor="end", colour=colour, style="strong")
    canvas.line([(across(min(shares.values())), y), (across(max(shares.values())), y)], colour, 2.0)
    for index, code in enumerate(languages):
        told = f"{option.label}: {percent(shares[code])} of {language_name(code)} tokens"
        canvas.marker((across(shares[code]), y), "circle", colour, "paper" if index else colour, told)
        x = canvas.width - column * (len(languages) - 1 - index)
        canvas.text((x, y + 4), percent(shares[code]), size=_SIZE, anchor="end")


def draw_cost(runs: Sequence[ComparedRun], width: float) -> Canvas:
    """Draw trainable parameters, speed and peak memory of training, a bar for every run.

    Args:
        runs: all of them; a figure that a run has no record of is said to be missing.
        width: of the figure, in pixels.
    """
    panels: list[tuple[str, Callable[[ComparedRun], float | None], Callable[[float | None], str]]] = [
        ("trainable parameters", lambda run: run.trainable_parameters, short_count),
        ("training, tokens/s", lambda run: run.tokens_per_s, rate),
        ("peak memory of training", lambda run: run.peak_memory_bytes, short_bytes),
    ]
    stacked = width < 600
    labels = _label_width([run.name for run in runs], width)
    height = 30 + _ROW * len(runs) + 10
    canvas = Canvas(width, height * len(panels) if stacked else height)
    room = (width - labels) / (1 if stacked else len(panels))
    for index, (title, value_of, said) in enumerate(panels):
        corner = (labels, index * height) if stacked else (labels + index * room, 0.0)
        values = [value_of(run) for run in runs]
        canvas.text((corner[0] + 12, corner[1] + 16), title, size=_SIZE, style="strong")
        if stacked or index == 0:
            _draw_row_labels(canvas, runs, labels, corner[1] + 30)
        _draw_bars(canvas, runs, values, [said(value) for value in values], (corner[0] + 12, corner[1] + 30), room)
    return canvas


def _draw_row_labels(canvas: Canvas, runs: Sequence[ComparedRun], labels: float, top: float) -> None:
    for index, run in enumerate(runs):
        y = top + _ROW * (index + 0.5)
        text = shortened(run.name, _SIZE, labels)
        canvas.text((labels, y + 4), text, size=_SIZE, anchor="end", colour=run.method.variant, style="strong")


def _draw_bars(
    canvas: Canvas,
    runs: Sequence[ComparedRun],
    values: Sequence[float | None],
    texts: Sequence[str],
    corner: Point,
    room: float,
) -> None:
    longest = room - 34 - max(text_width(text, _SIZE) for text in texts)
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    canvas.line([corner, (corner[0], corner[1] + _ROW * len(runs))], "axis")
    for index, (run, value, text) in enumerate(zip(runs, values, texts, strict=True)):
        y, variant = corner[1] + _ROW * index, run.method.variant
        length = 0.0 if value is None else longest * value / most
        canvas.bar((corner[0], y + 6), (length, _ROW - 12), variant, variant, f"{run.name}: {text}")
        colour = "muted" if value is None else "ink"
        canvas.text((corner[0] + length + 6, y + _ROW / 2 + 4), text, size=_SIZE, colour=colour)


def _label_width(labels: Sequence[str], width: float) -> float:
    return min((0.38 if width < 600 else 0.3) * width, max(text_width(label, _SIZE) for label in labels) + 4)


def method_swatch(variant: str) -> str:
    """Return a method's mark as a small drawing for a line of text."""
    canvas = Canvas(12, 12)
    canvas.marker((6, 6), MARKERS[variant], variant, variant, radius=4.5)
    return canvas.inline(variant, "swatch")
