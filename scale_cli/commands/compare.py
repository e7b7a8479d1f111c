"""The verb `scale compare`: one report of finished runs, as a page, as Markdown and as JSON, with figures."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from scale_cli.comparison import (
    ComparedRun,
    Option,
    beside_base,
    front,
    load_runs,
    option_of,
    setup_differences,
    side_names,
)
from scale_cli.errors import require
from scale_cli.evaluation.results import BESIDE_BASE, FIGURES, ROLES, CorpusResult, Figure
from scale_cli.report import (
    AXIS,
    COLOURS,
    DASH,
    MARKS,
    Cell,
    Interval,
    Row,
    Table,
    add_legend,
    aligned,
    difference_cell,
    difference_in_words,
    draw_point,
    in_points,
    markdown,
    number,
    page,
    quantity,
    shorten,
    svg,
    with_interval,
)
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.layout import check_replaceable
from scale_cli.values import language_name

# What report.json says of itself; a folder whose report says this may be replaced by another comparison.
KIND = "scale comparison"
_LINEAR_BELOW = 0.01  # bits/byte forgotten; more of it on a logarithmic axis
Draw = Callable[[Any], None]


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    folder: Path  # where it is written
    runs: list[ComparedRun]
    options: list[Option]
    best: list[Option]  # that no other beats, or no other of one model

    def lines(self) -> list[str]:
        rows = [
            [option.label, *(DASH if s.value is None else with_interval(s, 4) for s in (option.lost, option.gained))]
            for option in self.options
        ]
        return [
            *aligned([["", *side_names(self.runs[0].report)], *rows], "lll"),
            "bits/byte against the base [95 %]",
            *(f"note: {line}" for line in notes(self)),
            f"report: {self.folder / 'report.html'}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return report.json: what was read, unchanged, and what was made of it."""
        base, of_option = self.runs[0].base, ("head", "label", "num_models", "passes")
        of_run = ("name", "cost", "curves")
        return {
            "kind": KIND,
            "base": {"name": base.name, "content_sha256": base.content_sha256},
            "notes": notes(self),
            "options": [
                {
                    "run": option.run.name,
                    **{key: getattr(option, key) for key in of_option},
                    "bits_per_byte_lost": option.lost,
                    "bits_per_byte_gained": option.gained,
                    "base_share_by_language": option.base_share,
                    "non_dominated": option in self.best,
                }
                for option in self.options
            ],
            "runs": [
                {
                    "folder": str(run.folder),
                    "method_in_words": run.method.in_words,
                    "method": run.method.model_dump(mode="json"),
                    "report": run.raw_report,
                    **{key: getattr(run, key) for key in of_run},
                }
                for run in self.runs
            ],
        }


def compare(folders: list[Path], output: Path) -> Comparison:
    """Compare finished runs, and write report.html, report.md, report.json and the figures."""
    require("matplotlib", "scale compare")
    check_replaceable(output, KIND)
    comparison = compare_runs(load_runs(folders), output)
    drawn = figures_of(comparison)
    told = {"comparison": comparison, "notes": notes(comparison), "tables": tables(comparison), "figures": drawn}
    images = [(title, b64encode(drawing.encode()).decode()) for _, title, drawing in drawn]
    signs = {variant: sign for variant, (_, sign) in MARKS.items()}
    with new_folder(output) as folder:
        for name, _, drawing in drawn:
            write_text(folder / f"{name}.svg", drawing)
        write_json(folder / "report.json", to_jsonable_python(comparison.to_json()))
        write_text(folder / "report.md", markdown("comparison.md.j2", **told))
        write_text(
            folder / "report.html", page("comparison.html.j2", **told, images=images, colours=COLOURS, signs=signs)
        )
    return comparison


def compare_runs(runs: list[ComparedRun], folder: Path) -> Comparison:
    """Return the comparison of some runs, in their order; the base is one that reads its own tokens, if any does."""
    untouched = next((run for run in runs if not run.new_tokens), runs[0]).report
    # Every model as it is configured to be served, then mixed.
    options = [
        option_of(run, head, untouched) for run in runs for head in dict.fromkeys((run.report.served, "posterior"))
    ]
    best = front(options, 1) + front(options, 2) if untouched.has_trade_off else []
    return Comparison(folder, runs, options, best)


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know before comparing: unequal budgets and settings, figures that are not there."""
    runs, lines = comparison.runs, []
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        lines.append(f"The runs were not trained on the same number of tokens: {spent}.")
    if any(run.new_tokens != runs[0].new_tokens for run in runs):
        held = ", ".join(
            f"{run.name} {' '.join(number(corpus.bytes_per_token, 2) for corpus in run.report.corpora)}" for run in runs
        )
        lines.append(
            "The runs have different tokens: bits/byte compare between them, figures of a token do not. A difference "
            f"between different tokens has no interval. Bytes a token, by corpus: {held}."
        )
    for name, changed in setup_differences(runs).items():
        lines.append(f"Set up otherwise than {runs[0].name}: {name} in {'; '.join(changed)}.")
    if len({(run.cost.device, run.cost.num_processes) for run in runs}) > 1:
        found = ", ".join(f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs)
        lines.append(f"The runs were trained on different devices; speed and memory do not compare: {found}.")
    for run in runs:
        for benchmark in run.report.skipped_benchmarks:
            lines.append(f"{run.name}: {benchmark.name} was not measured ({benchmark.reason}).")
    odd = [option.label for option in comparison.options if not option.is_finite]
    if runs[0].report.has_trade_off and odd:
        lines.append(f"Left out of the trade-off picture, without a finite loss on both sides: {', '.join(odd)}.")
    return lines


def tables(comparison: Comparison) -> list[Table]:
    """Return the methods, every corpus, and all benchmarks where there are any; a row is an option, or the base."""
    corpora = (_corpus_table(comparison.options, corpus) for corpus in comparison.runs[0].report.corpora)
    return [_methods_table(comparison), *corpora, *_benchmark_tables(comparison)]


def _methods_table(comparison: Comparison) -> Table:
    report = comparison.runs[0].report
    languages = list(dict.fromkeys(corpus.language for corpus in report.corpora))
    titles = [
        Cell("method"),
        *(Cell(side, "bits/byte, 95 %") for side in side_names(report)),
        Cell("by base head", f"% of {' / '.join(languages)}"),
        Cell("passes", "a token"),
        Cell("trainable", "parameters"),
        Cell("training", "tokens/s"),
        Cell("peak memory", "of training"),
    ]

    def row(option: Option) -> Row:
        run, bold, shares, cost = option.run, option in comparison.best, option.base_share, option.run.cost
        return [
            Cell(option.label, f"{run.method.in_words}; served {option.served}"),
            replace(difference_cell(option.lost), bold=bold),
            replace(difference_cell(option.gained), bold=bold),
            " / ".join(f"{100 * shares[code]:.1f}" for code in languages) if shares else DASH,
            option.passes,
            quantity(cost.trainable_parameters),
            DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f}",
            quantity(cost.peak_memory_bytes, "B"),
        ]

    variants = [option.run.method.variant for option in comparison.options]
    return Table(titles, [row(option) for option in comparison.options], "lrrrrrrr", "Methods", variants)


def _corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    """Return every base's figures, in its own tokens, and every option's; figures of a token where alike."""
    shown = [figure for figure in FIGURES if figure.compared]
    titles = [Cell("method"), Cell("bytes", "a token"), *(Cell(figure.title, figure.unit) for figure in shown)]
    untouched = options[0].untouched.corpus(corpus.name)

    def row(label: str, result: CorpusResult, head: str, difference: Interval | None) -> Row:
        figures = result.heads[head]
        if difference is not None:
            figures = replace(figures, bits_per_byte_difference=difference)
        alike = result.num_tokens == untouched.num_tokens

        def cell(figure: Figure) -> str | Cell:
            hidden = head == "base" and not figure.of_base and (difference is None or figure is not BESIDE_BASE)
            return DASH if hidden or (not alike and (figure.per_token or figure.of_own_base)) else figure.cell(figures)

        return [label, number(result.bytes_per_token, 2), *map(cell, shown)]

    bases, rows = {untouched.num_tokens: row("base", untouched, "base", None)}, []
    for option in options:
        result = option.run.report.corpus(corpus.name)
        rows.append(row(option.label, result, option.head, beside_base(option.untouched, result, option.head)))
        own = f"base, tokens of {option.run.name}"
        bases.setdefault(result.num_tokens, row(own, result, "base", beside_base(option.untouched, result, "base")))
    name = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    marks = ["base"] * len(bases) + [option.run.method.variant for option in options]
    table = Table(titles, [*bases.values(), *rows], "l" + "r" * (len(titles) - 1), name, marks)
    return table.without_empty_columns()


def _benchmark_tables(comparison: Comparison) -> list[Table]:
    """Return of every benchmark the base's score, and the points by which each option differs from it."""
    runs, options = comparison.runs, comparison.options
    measured = {result.name: result for run in runs for result in run.report.benchmarks}
    if not measured:
        return []
    titles = [
        Cell("method"),
        *(Cell(name, f"{language_name(of.language)}, {of.num_items:,} items") for name, of in measured.items()),
    ]
    scores = (in_points(of.heads["base"].metrics[of.judged_by]) for of in measured.values())
    rows: list[Row] = [[Cell("base", "%"), *(number(score.value, 1) for score in scores)]]

    def cell(option: Option, name: str) -> str | Cell:
        result = option.run.report.benchmark(name)
        if result is None:
            return "not measured"
        head = result.heads[option.head]
        difference = head.differences[result.judged_by]
        told = difference_in_words(difference, head.p_holm)
        return Cell(with_interval(in_points(difference), 1), told)

    rows += [[Cell(option.label, "points"), *(cell(option, name) for name in measured)] for option in options]
    variants = ["base", *(option.run.method.variant for option in options)]
    return [Table(titles, rows, "l" + "r" * len(measured), "Benchmarks", variants)]


def figures_of(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the figures of a comparison, each with the name of its file and its title, as SVG."""
    runs, shown = comparison.runs, [option for option in comparison.options if option.is_finite]
    drawn: list[tuple[str, str, Draw]] = []
    if shown:
        drawn.append(("trade-off", "Trade-off", partial(_draw_trade_off, options=shown)))
    for index, corpus in enumerate(
        corpus for corpus in runs[0].report.corpora if any(corpus.name in run.curves for run in runs)
    ):
        draw = partial(_draw_curves, runs=[run for run in runs if corpus.name in run.curves], corpus=corpus)
        drawn.append((f"curve-{index}", f"Learning curve, {corpus.name}", draw))
    return [(name, title, svg(draw)) for name, title, draw in drawn]


def _axes(figure: Any, title: str, height_inches: float, num_labels: int) -> Any:
    figure.set_size_inches(5.0, height_inches + 0.18 * math.ceil(num_labels / 2))
    axes = figure.subplots()
    axes.set_title(title)
    return axes


def _number(axes: Any, index: int, place: Any, colour: str) -> None:
    """Write beside a mark its number in the legend."""
    axes.annotate(str(index), place, (6, 4), textcoords="offset points", color=colour, weight="bold")


def _draw_trade_off(figure: Any, options: Sequence[Option]) -> None:
    """Draw every option, numbered as in the legend, and a line through those that no other beats."""
    axes = _axes(figure, "Forgetting and gain against the base", 4.0, len(options) + 1)
    draw_point(axes, "base", Interval(0.0, None, None), Interval(0.0, None, None), COLOURS["base"], "o")
    for index, option in enumerate(options, 1):
        variant, filled = option.run.method.variant, option.num_models == 1
        mark, label = MARKS[variant][0], f"{index}  {option.label}"
        draw_point(axes, label, option.lost, option.gained, COLOURS[variant], mark, filled=filled)
        _number(axes, index, (option.lost.value, option.gained.value), COLOURS[variant])
    for most_models, style in ((1, "-"), (2, "--")):
        best = front(options, most_models)
        places = [option.lost.value for option in best], [option.gained.value for option in best]
        axes.plot(*places, linestyle=style, color=AXIS, linewidth=1.4, zorder=1)
    axes.set_xscale("symlog", linthresh=_LINEAR_BELOW)  # what forgets little stands apart from what forgets much
    axes.xaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    axes.margins(0.08)
    lost, gained = side_names(options[0].run.report)
    axes.set(xlabel=f"{lost}, bits/byte", ylabel=f"{gained}, bits/byte")
    add_legend(figure)


def _draw_curves(figure: Any, runs: Sequence[ComparedRun], corpus: CorpusResult) -> None:
    """Draw what each run serves over training; runs of different tokens in bits/byte, by the bytes a token."""
    role = "kept" if corpus.role == "retention" else "learned"
    axes = _axes(figure, f"{language_name(corpus.language)}, {role}: {shorten(corpus.name)}", 3.0, len(runs) + 1)
    measured = {run.name: run.report.corpus(corpus.name) for run in runs}
    in_bytes = len({of.num_tokens for of in measured.values()}) > 1
    units = {name: 1 / (of.bytes_per_token * math.log(2)) if in_bytes else 1.0 for name, of in measured.items()}
    for index, run in enumerate(runs, 1):
        head, variant = "adapted" if run.report.served == "adapted" else "routed", run.method.variant
        said = [point.nats_per_token.get(head) for point in run.curves[corpus.name]]
        xs = [point.num_tokens for point in run.curves[corpus.name]]
        ys = [math.nan if nats is None else nats * units[run.name] for nats in said]
        style = {"color": COLOURS[variant], "marker": MARKS[variant][0], "markevery": [-1], "linewidth": 1.8}
        axes.plot(xs, ys, label=shorten(f"{index}  {run.name}"), **style)
        _number(axes, index, (xs[-1], ys[-1]), COLOURS[variant])
    before = runs[0].curves[corpus.name][0].nats_per_token["base"]
    if before is not None:
        level = before * units[runs[0].name]
        axes.axhline(level, label="base", color=COLOURS["base"], linestyle="--", linewidth=1.4)
    axes.set(xlabel="training tokens", ylabel="bits/byte" if in_bytes else "nats/token")
    axes.xaxis.set_major_formatter(lambda tokens, _: quantity(tokens))
    add_legend(figure)
