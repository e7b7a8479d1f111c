"""The figures of a comparison: trade-off, learning curves, benchmarks, route shares, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from scale_cli.comparison.options import Option, corpora_in_words, front, languages_of
from scale_cli.comparison.runs import ComparedRun, benchmarks_of
from scale_cli.config.display_names import language_name
from scale_cli.report.figures import (
    LIGHT,
    MARKS,
    TradeOffPoint,
    draw_points,
    lead_to,
    panel,
    pointed_at,
    set_size,
    shortened,
    text_width,
    write_at,
)
from scale_cli.report.label_placement import Place, place_labels, spread
from scale_cli.report.numbers import (
    NOT_RECORDED,
    Interval,
    bounds,
    difference_in_words,
    in_points,
    number,
    percent,
    quantity,
    shows_difference,
)

_ROW, _SIZE = 26.0, 12.0
_LABEL_GAP, _GUTTER = 14.0, 28.0
# Losses this far apart would lie on top of each other on a linear axis.
_WIDE_RANGE = 30.0
# Beyond so many times what the options differ by, the base is left outside the picture.
_FAR_FROM_BASE = 2.0


def draw_trade_off(figure: Any, width: float, options: Sequence[Option]) -> None:
    """Draw every option that has finite figures, its intervals, and the options that no other beats."""
    shown = [option for option in options if option.is_finite]
    small = width < 600
    size, left = (11.0, 52) if small else (12.5, 70)
    height = min(1600.0, (400 if small else 480) + (16 if small else 6) * len(shown))
    set_size(figure, width, height)
    axes = panel(figure, left, 30, width - (14 if small else 24), height - 56)
    points = [_point(option) for option in shown]
    near = [not _is_far([getattr(point, side) for point in points]) for side in ("lost", "gained")]
    for is_near, line in zip(near, (axes.axvline, axes.axhline), strict=True):
        if is_near:
            line(0.0, color=LIGHT["axis"], linewidth=1.0)
    if all(near):
        points.insert(0, TradeOffPoint("base", "base", "o", Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0)))
    draw_points(axes, points)
    best, best_in_one = front(shown, lambda _: True), front(shown, lambda option: option.num_models == 1)
    paths = [_draw_front(axes, best_in_one, all(near), "-")]
    if best != best_in_one:
        paths.append(_draw_front(axes, best, all(near), "--"))
    _set_scales(axes, [point.place[0] for point in points], small)
    report = options[0].run.report
    kept, taught = (corpora_in_words(report.with_role(role)) for role in ("retention", "acquisition"))
    lost, gained = (languages_of(report, role) for role in ("retention", "acquisition"))
    axes.set_xlabel(shortened(f"{lost} lost, bits/byte ({kept})", size, width - left), size=size, labelpad=8)
    axes.set_ylabel(shortened(f"{gained} gained, bits/byte ({taught})", size, height - 86), size=size, labelpad=8)
    write_at(figure, (left, height - 18), "↖ better", size=size, color=LIGHT["muted"], weight="bold")
    _label_points(figure, axes, points, paths, size)


def _point(option: Option) -> TradeOffPoint:
    variant = option.run.method.variant
    return TradeOffPoint(
        option.label, variant, MARKS[variant][0], option.lost, option.gained, filled=option.num_models == 1
    )


def _is_far(intervals: Sequence[Interval]) -> bool:
    """Return whether all that differs would lie in a corner if zero, the base, were in the picture too."""
    ends = [end for interval in intervals for end in interval.ends]
    low, high = min(ends), max(ends)
    return low * high > 0.0 and min(abs(low), abs(high)) > _FAR_FROM_BASE * (high - low) > 0.0


def _set_scales(axes: Any, losses: Sequence[float], small: bool) -> None:
    """Make the axis of losses logarithmic beyond some loss either way, where a linear one would hide the small."""
    largest = max((abs(loss) for loss in losses), default=0.0)
    hidden = [abs(loss) for loss in losses if 0.0 < abs(loss) < largest / _WIDE_RANGE]
    axes.margins(x=0.07, y=0.08)
    axes.locator_params(axis="y", nbins=6)
    if not hidden:
        axes.locator_params(axis="x", nbins=4 if small else 8)
        return
    knee = 10.0 ** math.floor(math.log10(max(median(hidden), largest / 1e4)))
    axes.set_xscale("asinh", linear_width=knee)
    powers = [10.0**decade for decade in range(round(math.log10(knee)), 1 + math.ceil(math.log10(largest)))]
    low, high = axes.get_xlim()
    ticks = [x for x in (*(-power for power in powers), 0.0, *powers) if low <= x <= high]
    # Where there is no room for all, those nearest zero stay, positive ones before negative.
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda x: (abs(x), -x)):
        at = axes.transData.transform((tick, 0.0))[0]
        if all(abs(axes.transData.transform((other, 0.0))[0] - at) > 46 for other in kept):
            kept.append(tick)
    axes.set_xticks(kept, [f"{tick:g}".replace("-", "−") for tick in kept])
    axes.minorticks_off()
    axes.set_xlim(low, high)


def _draw_front(axes: Any, options: Sequence[Option], with_base: bool, style: str) -> list[Place]:
    """Join the options of a front, beginning at the untouched base where nothing beats that."""
    path = [_point(option).place for option in options]
    if with_base and not any(lost <= 0.0 <= gained for lost, gained in path):
        path = sorted([*path, (0.0, 0.0)])
    axes.plot(*zip(*path, strict=True), linestyle=style, color=LIGHT["axis"], linewidth=1.6, zorder=1)
    return path


def _label_points(
    figure: Any, axes: Any, points: Sequence[TradeOffPoint], paths: Sequence[list[Place]], size: float
) -> None:
    axes.get_xlim(), axes.get_ylim()  # settles the scales
    width, height = (72 * inches for inches in figure.get_size_inches())
    texts = [shortened(point.label, size, 0.34 * width) for point in points]
    places: list[Place] = [tuple(axes.transData.transform(point.place)) for point in points]
    arms = [[(end, point.place[1]) for end in (point.lost.low, point.lost.high) if end is not None] for point in points]
    covered = [place for path in [*paths, *arms] for place in _along([axes.transData.transform(p) for p in path])]
    sizes = [(text_width(text, size), size + 2) for text in texts]
    boxes = place_labels(places, sizes, covered, (54.0 if width < 600 else 74.0, 58.0, width - 4, height - 24))
    for point, place, text, box in zip(points, places, texts, boxes, strict=True):
        near = (min(max(place[0], box[0]), box[2]), min(max(place[1], box[1]), box[3]))
        if math.dist(place, near) > 16:
            lead_to(figure, place, near, point.colour)
        write_at(figure, (box[0], box[1] + 3.5), text, size=size, color=LIGHT[point.colour], weight="bold")


def _along(line: Sequence[Place]) -> list[Place]:
    """Return points along a line, a few pixels apart."""
    points: list[Place] = []
    for (x0, y0), (x1, y1) in pairwise(line):
        count = max(1, int(math.dist((x0, y0), (x1, y1)) / 6))
        points += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1)]
    return points


def draw_curves(figure: Any, width: float, runs: Sequence[ComparedRun]) -> None:
    """Draw one panel for every held-out corpus, a line for every run (at least one has curves), named where it ends."""
    corpora = [corpus for corpus in runs[0].report.corpora if any(corpus.name in run.curves for run in runs)]
    height = max(270.0, 90 + _LABEL_GAP * (len(runs) + 1))
    for corpus, (left, top, right) in zip(corpora, _grid(figure, width, len(corpora), height), strict=True):
        lines, unit = _lines(runs, corpus.name)
        room = min(104 if width < 600 else 140, 20 + max(text_width(label, 11.5) for label, *_ in lines))
        axes = panel(figure, left + 42, top + 48, right - room, top + height - 46)
        role = "kept" if corpus.role == "retention" else "learned"
        _set_title(
            axes,
            f"{language_name(corpus.language)}, {role}: {corpus.name}",
            f"{unit}, lower is better",
            right - left,
        )
        _draw_lines(figure, axes, lines, room)


# A label, a method, and the loss by tokens trained on; None where it was not finite.
_Line = tuple[str, str, list[tuple[float, float | None]]]


def _lines(runs: Sequence[ComparedRun], name: str) -> tuple[list[_Line], str]:
    """Return the lines of a corpus and their unit: of runs with different tokens bits/byte, by its bytes a token."""
    corpora = {run.name: run.report.corpus(name) for run in runs}
    unit, of_a_nat = "nats/token", dict.fromkeys(corpora, 1.0)
    if len({corpus.num_tokens for corpus in corpora.values()}) > 1:
        unit = "bits/byte"
        of_a_nat = {run: 1.0 / (corpus.bytes_per_token * math.log(2)) for run, corpus in corpora.items()}
    lines: list[_Line] = []
    for run in runs:
        head = "adapted" if run.report.served == "adapted" else "routed"
        if points := run.curves.get(name):
            losses = [(point.num_tokens, point.nats_per_token.get(head)) for point in points]
            line = [(at, None if nats is None else nats * of_a_nat[run.name]) for at, nats in losses]
            lines.append((run.name, run.method.variant, line))
    first = next(run for run in runs if name in run.curves)
    before = first.curves[name][0].nats_per_token["base"]
    base = None if before is None else before * of_a_nat[first.name]
    longest = max(line[-1][0] for *_, line in lines)
    return [("base", "base", [(0.0, base), (longest, base)]), *lines], unit


def _draw_lines(figure: Any, axes: Any, lines: Sequence[_Line], room: float) -> None:
    for _, variant, line in lines:
        xs, ys = [x for x, _ in line], [math.nan if y is None else y for _, y in line]
        style = (
            {"linestyle": "--", "linewidth": 1.4}
            if variant == "base"
            else {"linewidth": 2.0, "markevery": [-1], "markersize": 8}
        )
        axes.plot(xs, ys, color=LIGHT[variant], marker="" if variant == "base" else MARKS[variant][0], **style)
    axes.grid(axis="x", visible=False)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="y", nbins=6)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(
        lambda tokens, _: f"{tokens / 1000:g}k" if 1000 <= tokens < 1e6 else quantity(tokens)
    )
    axes.set_xlim(0.0, max(line[-1][0] for *_, line in lines) or 1.0)
    axes.margins(y=0.06)
    axes.set_xlabel("training tokens")
    low = axes.get_ylim()[0]
    ends = [next(((x, y) for x, y in reversed(line) if y is not None), (0.0, low)) for *_, line in lines]
    places = axes.transData.transform(ends)
    right, (bottom, top) = axes.bbox.x1, (axes.bbox.y0, axes.bbox.y1)
    heights = spread([y for _, y in places], _LABEL_GAP, bottom - 6, top + 6)
    for (label, colour, line), (x, y), height in zip(lines, places, heights, strict=True):
        if line[-1][1] is not None:  # a line that broke off before the end is not led to
            lead_to(figure, (x + 5, y), (right + 14, height), colour)
        text = shortened(label, 11.5, room - 18)
        write_at(figure, (right + 17, height - 4), text, color=LIGHT[colour], weight="bold")


def draw_tasks(figure: Any, width: float, runs: Sequence[ComparedRun]) -> None:
    """Draw one panel for every benchmark (there is one), all on one scale, with a bar for every run."""
    results = benchmarks_of(runs)
    height = 90 + 22.0 * len(runs)
    served = [_served(run, result.name) for run in runs for result in results]
    reach = [0.0, *(end for of_one in served if of_one is not None for end in of_one[0].ends)]
    for result, (left, top, right) in zip(results, _grid(figure, width, len(results), height), strict=True):
        labels = min(0.3 * (right - left), max(text_width(run.name, _SIZE) for run in runs) + 4)
        axes = panel(figure, left + labels + 10, top + 44, right - 48, top + height - 46)
        of_base = in_points(result.heads["base"].metrics[result.judged_by])
        base = f"base {number(of_base.value, 1)} % of {result.num_items:,} items"
        _set_title(axes, f"{result.name}, {language_name(result.language)}", base, right - left, labels + 10)
        _set_rows(axes, [(run.name, run.method.variant) for run in runs], labels)
        axes.set_xlim(min(reach) - 0.3, max(reach) + 0.3)
        axes.margins(x=0.05)
        axes.locator_params(axis="x", nbins=4)
        axes.axvline(0.0, color=LIGHT["axis"], linewidth=1.0, zorder=0.5)
        axes.set_xlabel("accuracy − base, points", size=11)
        for row, run in enumerate(runs):
            _draw_task_bar(axes, row, run, _served(run, result.name))


def _served(run: ComparedRun, name: str) -> tuple[Interval, float | None] | None:
    """Return the difference of what is served from the base in points, and its p-value; None where there is none."""
    result = run.report.benchmark(name)
    if result is None:
        return None
    head = result.heads[run.report.served]
    points = in_points(head.differences[result.judged_by])
    return None if points.value is None else (points, head.p_holm)


def _draw_task_bar(axes: Any, row: int, run: ComparedRun, served: tuple[Interval, float | None] | None) -> None:
    if served is None:
        _beside_row(axes, row, "none", LIGHT["muted"])
        return
    (points, p_holm), colour = served, LIGHT[run.method.variant]
    text = f"{run.name}: {number(points.value, 1, '+')} {bounds(points, 1)}, {difference_in_words(points, p_holm)}"
    filled = shows_difference(p_holm)
    _draw_bar(axes, row, points.value or 0.0, colour, colour if filled else LIGHT["paper"], text)
    if points.low is not None and points.high is not None:
        axes.plot((points.low, points.high), (row, row), color=LIGHT["ink"], linewidth=1.2)
    _beside_row(axes, row, number(points.value, 1, "+").replace("-", "−"), LIGHT["ink"])


def draw_shares(figure: Any, width: float, options: Sequence[Option]) -> None:
    """Draw the share of each language's tokens that the base head served, of options that all mix two heads."""
    languages = list(options[0].base_share or {})
    small = width < 600
    labels = _label_width([option.label for option in options], width)
    names = [code if small else language_name(code) for code in languages]
    column = max(60.0, 34 + max(text_width(name, _SIZE) for name in names))
    height = 76 + _ROW * len(options)
    set_size(figure, width, height)
    axes = panel(figure, labels + 12, 30, width - column * len(languages) - 14, height - 46)
    _set_rows(axes, [(option.label, option.run.method.variant) for option in options], labels)
    axes.set_xlim(-2, 102)
    axes.set_xticks([0, 50, 100] if small else [0, 25, 50, 75, 100])
    axes.set_xlabel("% served by the base head" if small else "% of tokens served by the base head")
    for row, option in enumerate(options):
        shares, colour = option.base_share or {}, LIGHT[option.run.method.variant]
        axes.plot([100 * share for share in shares.values()], [row] * len(shares), color=colour, linewidth=2.0)
        for index, code in enumerate(languages):
            text = pointed_at(f"{option.label}: {percent(shares[code])} of {language_name(code)} tokens")
            fill = LIGHT["paper"] if index else colour
            axes.plot(100 * shares[code], row, "o", color=colour, markerfacecolor=fill, markersize=9, gid=text)
            _beside_row(axes, row, percent(shares[code]), LIGHT["ink"], column * (index + 1) + 14)
    for index, name in enumerate(names):
        right = width - column * (len(languages) - 1 - index)
        write_at(figure, (right, height - 16), f"{'○' if index else '●'} {name}", size=_SIZE, weight="bold", ha="right")


def draw_cost(figure: Any, width: float, runs: Sequence[ComparedRun]) -> None:
    """Draw trainable parameters, speed and peak memory of training: a bar for every run, or that it has no record."""
    panels: list[tuple[str, Callable[[ComparedRun], float | None], str]] = [
        ("trainable parameters", lambda run: run.trainable_parameters, ""),
        ("training, tokens/s", lambda run: run.tokens_per_s, "/s"),
        ("peak memory of training", lambda run: run.peak_memory_bytes, "B"),
    ]
    stacked = width < 600
    labels = _label_width([run.name for run in runs], width)
    height, room = 40 + _ROW * len(runs), (width - labels) / (1 if stacked else len(panels))
    set_size(figure, width, height * len(panels) if stacked else height)
    for index, (title, value_of, unit) in enumerate(panels):
        left, top = (labels, index * height) if stacked else (labels + index * room, 0.0)
        values = [value_of(run) for run in runs]
        texts = [_cost_text(value, unit) for value in values]
        space = 34 + max(text_width(text, _SIZE) for text in texts)
        axes = panel(figure, left + 12, top + 30, left + room - space, top + height - 10)
        axes.set_title(title, size=_SIZE)
        _set_rows(axes, [(run.name if stacked or index == 0 else "", run.method.variant) for run in runs], labels)
        axes.set_xticks([])
        axes.spines["left"].set_visible(True)
        axes.set_xlim(0.0, max((value for value in values if value is not None), default=0.0) or 1.0)
        for row, (run, value, text) in enumerate(zip(runs, values, texts, strict=True)):
            colour = LIGHT[run.method.variant]
            _draw_bar(axes, row, value or 0.0, colour, colour, f"{run.name}: {text}")
            axes.annotate(
                text, (value or 0.0, row), (6, 0), textcoords="offset points", va="center_baseline", size=_SIZE,
                color=LIGHT["muted" if value is None else "ink"],
            )  # fmt: skip


def _cost_text(value: float | None, unit: str) -> str:
    if value is None:
        return NOT_RECORDED
    return f"{value:,.0f}" if unit == "/s" else quantity(value, unit)


def _grid(figure: Any, width: float, count: int, height: float) -> list[tuple[float, float, float]]:
    """Size a figure for panels of a height, side by side where there is room; return left, top and right of each."""
    columns = 1 if width < 600 else min(2, count)
    set_size(figure, width, -(-count // columns) * height)
    wide = (width - _GUTTER * (columns - 1)) / columns
    lefts = [(index % columns) * (wide + _GUTTER) for index in range(count)]
    return [(left, index // columns * height, left + wide) for index, left in enumerate(lefts)]


def _set_title(axes: Any, title: str, below: str, room: float, indent: float = 40.0) -> None:
    axes.annotate(
        shortened(title, 13, room - 8), (0, 1), (-indent, 28), xycoords="axes fraction", textcoords="offset points",
        size=13, weight="bold",
    )  # fmt: skip
    axes.annotate(
        below, (0, 1), (-indent, 11), xycoords="axes fraction", textcoords="offset points", color=LIGHT["muted"]
    )


def _set_rows(axes: Any, rows: Sequence[tuple[str, str]], room: float) -> None:
    """Give an axis a row for each label, in the colour of its method."""
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [shortened(label, _SIZE, room) for label, _ in rows])
    for tick, (_, variant) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(color=LIGHT[variant], weight="bold", size=_SIZE)
    axes.tick_params(axis="y", pad=8)
    axes.grid(axis="y", visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_bar(axes: Any, row: int, length: float, colour: str, fill: str, text: str) -> None:
    (bar,) = axes.barh(row, length, height=0.54, facecolor=fill, edgecolor=colour, linewidth=1.4, zorder=2)
    bar.set_gid(pointed_at(text))


def _beside_row(axes: Any, row: int, text: str, colour: str, right: float = 46.0) -> None:
    """Write a figure beside a row, to end so many pixels right of the axes."""
    axes.annotate(
        text, (1, row), (right, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", va="center_baseline", size=_SIZE, color=colour,
    )  # fmt: skip


def _label_width(labels: Sequence[str], width: float) -> float:
    return min((0.38 if width < 600 else 0.3) * width, max(text_width(label, _SIZE) for label in labels) + 4)
