"""Learning curves: the loss on every held-out corpus against the tokens trained on."""

from __future__ import annotations

from collections.abc import Sequence

from scale_cli.comparison.labels import spread
from scale_cli.comparison.palette import MARKERS
from scale_cli.comparison.runs import ComparedRun
from scale_cli.comparison.svg import Axis, Canvas, Point, linear_ticks, shortened, text_width, tick_text
from scale_cli.comparison.words import tick_count
from scale_cli.evaluation.render import language_name
from scale_cli.evaluation.results import CorpusResult

_LABEL_GAP = 14.0
_GUTTER = 28.0

# (label, colour, marker, (tokens, nats per token) in order; None where the loss was not finite)
Series = tuple[str, str, str, list[tuple[float, float | None]]]


def runs_with_curves(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs that were evaluated as they trained."""
    return [run for run in runs if run.curves]


def served_curve_head(run: ComparedRun) -> str:
    """Return which head of a periodic evaluation is what the run serves."""
    return "adapted" if run.report.served == "adapted" else "routed"


def draw_curves(runs: Sequence[ComparedRun], width: float) -> Canvas:
    """Draw one panel for every held-out corpus, a line for every run, labelled where it ends.

    Args:
        runs: with curves.
        width: of the figure, in pixels.
    """
    corpora = [corpus for corpus in runs[0].report.corpora if any(corpus.name in run.curves for run in runs)]
    columns = 1 if width < 600 else min(2, len(corpora))
    rows = -(-len(corpora) // columns)
    panel = ((width - _GUTTER * (columns - 1)) / columns, max(270.0, 90 + _LABEL_GAP * (len(runs) + 1)))
    canvas = Canvas(width, rows * panel[1])
    for index, corpus in enumerate(corpora):
        corner = ((index % columns) * (panel[0] + _GUTTER), (index // columns) * panel[1])
        _draw_panel(canvas, corpus, _series(runs, corpus.name), corner, panel)
    return canvas


def _series(runs: Sequence[ComparedRun], corpus: str) -> list[Series]:
    series: list[Series] = []
    for run in runs:
        points = run.curves.get(corpus, [])
        head, variant = served_curve_head(run), run.method.variant
        if points:
            line = [(point.num_tokens, point.nats_per_token.get(head)) for point in points]
            series.append((run.name, variant, MARKERS[variant], line))
    base = next(run.curves[corpus] for run in runs if corpus in run.curves)[0].nats_per_token["base"]
    longest = max(line[-1][0] for _, _, _, line in series)
    return [("base", "base", "", [(0.0, base), (longest, base)]), *series]


def _draw_panel(canvas: Canvas, corpus: CorpusResult, series: Sequence[Series], corner: Point, size: Point) -> None:
    small = canvas.width < 600
    room = min((104 if small else 140), 20 + max(text_width(label, 11.5) for label, *_ in series))
    left, right = corner[0] + 42, corner[0] + size[0] - room
    top, bottom = corner[1] + 48, corner[1] + size[1] - 46
    losses = [loss for *_, line in series for _, loss in line if loss is not None]
    low, high = min(losses), max(losses)
    pad = 0.06 * (high - low) or 0.1
    across = Axis(0.0, max(line[-1][0] for *_, line in series) or 1.0, left, right)
    up = Axis(low - pad, high + pad, bottom, top)
    role = "kept" if corpus.role == "retention" else "learned"
    title = shortened(f"{language_name(corpus.language)}, {role}: {corpus.name}", 13, size[0] - 8)
    canvas.text((corner[0] + 2, corner[1] + 16), title, size=13, style="strong")
    canvas.text((corner[0] + 2, corner[1] + 34), "nats/token, lower is better", size=11.5, colour="muted")
    for y in up.ticks(5):
        canvas.line([(left, up(y)), (right, up(y))], "grid")
        canvas.text((left - 6, up(y) + 4), tick_text(y), size=11, colour="muted", anchor="end")
    for x in linear_ticks(0.0, across.high, 3 if small else 4):
        canvas.line([(across(x), bottom), (across(x), bottom + 4)], "axis")
        canvas.text((across(x), bottom + 17), tick_count(x), size=11, colour="muted", anchor="middle")
    canvas.line([(left, bottom), (right, bottom)], "axis")
    canvas.text(((left + right) / 2, bottom + 35), "training tokens", size=11.5, anchor="middle")
    for _, colour, marker, line in series:
        _draw_line(canvas, [(across(x), None if y is None else up(y)) for x, y in line], colour, marker)
    _draw_end_labels(canvas, series, across, up, (right, corner[0] + size[0]))


def _draw_line(canvas: Canvas, points: Sequence[tuple[float, float | None]], colour: str, marker: str) -> None:
    """Draw a line through its finite points, and a mark at its last one."""
    stretch: list[Point] = []
    stretches = [stretch]
    for x, y in points:
        if y is None:
            stretch = []
            stretches.append(stretch)
        else:
            stretch.append((x, y))
    for stretch in stretches:
        if stretch:
            canvas.line(stretch, colour, 2.0 if marker else 1.4, "" if marker else "4 4")
    if marker and stretches[-1]:
        canvas.marker(stretches[-1][-1], marker, colour, colour, radius=3.6)


def _draw_end_labels(
    canvas: Canvas, series: Sequence[Series], across: Axis, up: Axis, sides: tuple[float, float]
) -> None:
    ends = [next(((x, y) for x, y in reversed(line) if y is not None), (0.0, up.low)) for *_, line in series]
    heights = spread([up(y) for _, y in ends], _LABEL_GAP, up.stop - 6, up.start + 6)
    for (label, colour, _, line), (x, y), height in zip(series, ends, heights, strict=True):
        text = shortened(label, 11.5, sides[1] - sides[0] - 18)
        if line[-1][1] is not None:  # a line that broke off before the end is not led to
            canvas.line([(across(x) + 5, up(y)), (sides[0] + 14, height)], colour, 0.8)
        canvas.text((sides[0] + 17, height + 4), text, size=11.5, colour=colour, style="strong")
