"""The verb `scale compare`: one report of finished runs, as HTML, Markdown and JSON, with a figure."""

from __future__ import annotations

import io
import math
import warnings
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from scale_cli.comparison import (
    ComparedRun,
    Option,
    front,
    load_runs,
    option_of,
    side_names,
)
from scale_cli.config.schema import RunConfig, differences
from scale_cli.errors import require
from scale_cli.evaluation.results import FIGURES, ROLES, CorpusResult
from scale_cli.report import (
    COLOURS,
    DASH,
    MARKS,
    Cell,
    Interval,
    Row,
    Table,
    aligned,
    difference_cell,
    difference_in_words,
    in_points,
    number,
    quantity,
    render,
    with_interval,
)
from scale_cli.runs.folder import check_replaceable
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.values import language_name

# The `kind` of report.json; a comparison may only replace a folder whose report has this kind.
KIND = "scale comparison"
# Config sections whose differences are reported; `model` is left out, as all runs have the same base content hash.
_SHOWN_SECTIONS = ("seed", "corpus", "train", "evaluation")
_SOURCES = r"(corpus\.sources|evaluation\.(perplexity|benchmarks))(\..*)?"
_LINEAR_BELOW = 0.01  # bits/byte forgotten; the axis is logarithmic above this
_LINES = "#8a8a8a"
_LABEL_WIDTH, _LABEL_HEIGHT = 28, 18  # of a number beside its point, in the figure's dots
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # the reader's font has Hangul, matplotlib's does not
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # a `$` in a run's name is not mathematics
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    folder: Path  # where it is written
    runs: list[ComparedRun]
    options: list[Option]
    best: list[Option]  # not beaten by any other, or by any other of one model

    def lines(self) -> list[str]:
        rows = [
            [
                of.label,
                *(
                    DASH if side.value is None else with_interval(side, 4)
                    for side in (of.lost, of.gained)
                ),
            ]
            for of in self.options
        ]
        return [
            *aligned([["", *side_names(self.runs[0].report)], *rows], "lll"),
            "bits/byte against the base [95 %]",
            *(f"note: {line}" for line in notes(self)),
            f"report: {self.folder / 'report.html'}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of report.json."""
        base = self.runs[0].base
        return {
            "kind": KIND,
            "base": {"name": base.name, "content_sha256": base.content_sha256},
            "notes": notes(self),
            "options": [
                {
                    "run": option.run.name,
                    "head": option.head,
                    "label": option.label,
                    "num_models": option.num_models,
                    "passes": option.passes,
                    "bits_per_byte_lost": option.lost,
                    "bits_per_byte_gained": option.gained,
                    "base_share_by_language": option.base_share,
                    "non_dominated": option in self.best,
                }
                for option in self.options
            ],
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "method_in_words": run.method.in_words,
                    "method": run.method.model_dump(mode="json"),
                    "report": run.report.to_json(),
                    "cost": run.cost,
                }
                for run in self.runs
            ],
        }


def compare(folders: list[Path], output: Path) -> Comparison:
    """Compare finished runs, and write report.html, report.md, report.json and the figure."""
    require("matplotlib", "scale compare")
    check_replaceable(output, KIND)
    comparison = compare_runs(load_runs(folders), output)
    drawn = draw_trade_off(comparison.options)
    told = {
        "comparison": comparison,
        "notes": notes(comparison),
        "tables": tables(comparison),
        "is_drawn": bool(drawn),
    }
    image = b64encode(drawn.encode()).decode()
    with new_folder(output) as folder:
        if drawn:
            write_text(folder / "trade-off.svg", drawn)
        write_json(folder / "report.json", to_jsonable_python(comparison.to_json()))
        write_text(folder / "report.md", render("comparison.md.j2", **told))
        write_text(folder / "report.html", render("comparison.html.j2", **told, image=image))
    return comparison


def compare_runs(runs: list[ComparedRun], folder: Path) -> Comparison:
    """Return the comparison of runs, in their order."""
    # Each model as it is configured to be served, then mixed.
    options = [
        option_of(run, head)
        for run in runs
        for head in dict.fromkeys((run.report.served, "posterior"))
    ]
    best = front(options, 1) + front(options, 2) if runs[0].report.has_trade_off else []
    return Comparison(folder, runs, options, best)


def notes(comparison: Comparison) -> list[str]:
    """Return notes that a reader needs before comparing: unequal budgets and settings, missing figures."""
    runs, lines = comparison.runs, []
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        lines.append(f"The runs were not trained on the same number of tokens: {spent}.")
    if grown := [
        run.name for run in runs if any(corpus.has_new_tokens for corpus in run.report.corpora)
    ]:
        lines.append(
            f"{', '.join(grown)}: with new tokens. Every difference is from the base by its own tokens, "
            "in bits/byte; figures per token are left out there."
        )
    for run in runs[1:]:
        if changed := setup_differences(runs[0].config, run.config):
            lines.append(
                f"{run.name} has other settings than {runs[0].name}: {'; '.join(changed)}."
            )
    if len({(run.cost.device, run.cost.num_processes) for run in runs}) > 1:
        found = ", ".join(
            f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs
        )
        lines.append(
            f"The runs were trained on different devices, so do not compare speed and memory: {found}."
        )
    for run in runs:
        for benchmark in run.report.skipped_benchmarks:
            lines.append(f"{run.name}: {benchmark.name} was not measured ({benchmark.reason}).")
    odd = [option.label for option in comparison.options if not option.is_finite]
    if runs[0].report.has_trade_off and odd:
        lines.append(
            f"Not in the trade-off figure, because a loss is not finite: {', '.join(odd)}."
        )
    return lines


def setup_differences(first: RunConfig, other: RunConfig) -> list[str]:
    """Return how a run's setup differs apart from its method: one line per key, or per list of sources."""
    lines = [
        line.replace("None", "not set")
        for line in differences(first, other, _SHOWN_SECTIONS, _SOURCES)
    ]
    for section, key in (
        ("corpus", "sources"),
        ("evaluation", "perplexity"),
        ("evaluation", "benchmarks"),
    ):
        old, new = (
            {source.name: source for source in getattr(getattr(config, section), key)}
            for config in (first, other)
        )
        if changed := sorted(name for name in {**old, **new} if old.get(name) != new.get(name)):
            lines.append(f"{section}.{key}: {', '.join(changed)}")
    return lines


def tables(comparison: Comparison) -> list[Table]:
    """Return tables of the methods, each corpus and the benchmarks, if any; a row is an option or the base."""
    corpora = (
        _corpus_table(comparison.options, corpus) for corpus in comparison.runs[0].report.corpora
    )
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
        bold, shares, cost = option in comparison.best, option.base_share, option.run.cost
        return [
            Cell(option.label, f"{option.run.method.in_words}; served {option.served}"),
            replace(difference_cell(option.lost), bold=bold),
            replace(difference_cell(option.gained), bold=bold),
            " / ".join(f"{100 * shares[code]:.1f}" for code in languages) if shares else DASH,
            option.passes,
            quantity(cost.trainable_parameters),
            DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f}",
            quantity(cost.peak_memory_bytes, "B"),
        ]

    variants = [option.run.method.variant for option in comparison.options]
    return Table(
        titles, [row(option) for option in comparison.options], "lrrrrrrr", "Methods", variants
    )


def _corpus_table(options: Sequence[Option], corpus: CorpusResult) -> Table:
    """Return the base and each option; a run with new tokens has no figures per token."""
    shown = [figure for figure in FIGURES if figure.compared]
    titles = [
        Cell("method"),
        Cell("bytes", "a token"),
        *(Cell(figure.title, figure.unit) for figure in shown),
    ]
    base = corpus.heads["base"]
    of_base = (figure.cell(base) if figure.of_base else DASH for figure in shown)
    rows: list[Row] = [["base", number(corpus.num_bytes / corpus.num_base_tokens, 2), *of_base]]
    for option in options:
        result = option.run.report.corpus(corpus.name)
        cells = (
            DASH
            if figure.per_token and result.has_new_tokens
            else figure.cell(result.heads[option.head])
            for figure in shown
        )
        rows.append([option.label, number(result.bytes_per_token, 2), *cells])

    name = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    marks = ["base", *(option.run.method.variant for option in options)]
    table = Table(titles, rows, "l" + "r" * (len(titles) - 1), name, marks)
    return table.without_empty_columns()


def _benchmark_tables(comparison: Comparison) -> list[Table]:
    """Return a table of the base's benchmark scores and each option's difference in points; empty if there are none."""
    runs, options = comparison.runs, comparison.options
    measured = {result.name: result for run in runs for result in run.report.benchmarks}
    if not measured:
        return []
    columns = [
        Cell(name, f"{language_name(of.language)}, {of.num_items:,} items")
        for name, of in measured.items()
    ]
    titles = [Cell("method"), *columns]
    scores = (in_points(of.heads["base"].metrics[of.judged_by]) for of in measured.values())
    rows: list[Row] = [[Cell("base", "%"), *(number(score.value, 1) for score in scores)]]

    def cell(option: Option, name: str) -> str | Cell:
        result = option.run.report.benchmark(name)
        if result is None:
            return "not measured"
        head = result.heads[option.head]
        difference = head.differences[result.judged_by]
        return Cell(
            with_interval(in_points(difference), 1), difference_in_words(difference, head.p_holm)
        )

    rows += [
        [Cell(option.label, "points"), *(cell(option, name) for name in measured)]
        for option in options
    ]
    variants = ["base", *(option.run.method.variant for option in options)]
    return [Table(titles, rows, "l" + "r" * len(measured), "Benchmarks", variants)]


def draw_trade_off(options: Sequence[Option]) -> str:
    """Return an SVG of all finite options, numbered as in the legend, with lines through those that no other beats."""
    from matplotlib import rc_context  # takes a second, and only the figure needs it
    from matplotlib.figure import Figure

    shown = [option for option in options if option.is_finite]
    if not shown:
        return ""
    lost, gained = side_names(shown[0].run.report)
    written = io.StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure((5.0, 4.0 + 0.18 * math.ceil((len(shown) + 1) / 2)), layout="constrained")
        axes: Any = figure.subplots()
        axes.plot(0.0, 0.0, MARKS["base"][0], color=COLOURS["base"], label="base")
        for index, option in enumerate(shown, 1):
            variant, place = option.run.method.variant, (option.lost.value, option.gained.value)
            colour, label = COLOURS[variant], f"{index}  {option.label}"
            style = {
                "fmt": MARKS[variant][0],
                "color": colour,
                "mfc": colour if option.num_models == 1 else "white",
            }
            axes.errorbar(*place, _arms(option.gained), _arms(option.lost), label=label, **style)
        for most_models, line in ((1, "-"), (2, "--")):
            best = front(options, most_models)
            places = (
                [option.lost.value for option in best],
                [option.gained.value for option in best],
            )
            axes.plot(*places, linestyle=line, color=_LINES, zorder=1)
        axes.margins(0.08)
        if (
            max(abs(option.lost.value or 0.0) for option in shown) > _LINEAR_BELOW
        ):  # shows small and large losses alike
            axes.set_xscale("symlog", linthresh=_LINEAR_BELOW)
        else:
            axes.locator_params(axis="x", nbins=4)  # more of such small figures would touch
        axes.xaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
        axes.set(
            title="Against the base", xlabel=f"{lost}, bits/byte", ylabel=f"{gained}, bits/byte"
        )
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.draw_without_rendering()  # the layout decides which points are close
        for indices, place in _close_together(axes, shown):
            variants = {shown[index - 1].run.method.variant for index in indices}
            colour = COLOURS[variants.pop()] if len(variants) == 1 else COLOURS["base"]
            named = ", ".join(map(str, indices))
            axes.annotate(named, place, (6, 4), textcoords="offset points", color=colour)
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _close_together(
    axes: Any, shown: Sequence[Option]
) -> list[tuple[list[int], tuple[float, float]]]:
    """Return options' numbers in groups whose labels would overlap, each with its first place."""
    groups: list[tuple[list[int], tuple[float, float]]] = []
    for index, option in enumerate(shown, 1):
        place: Any = (option.lost.value, option.gained.value)
        x, y = axes.transData.transform(place)
        for indices, first in groups:
            first_x, first_y = axes.transData.transform(first)
            if abs(x - first_x) < _LABEL_WIDTH and abs(y - first_y) < _LABEL_HEIGHT:
                indices.append(index)
                break
        else:
            groups.append(([index], place))
    return groups


def _arms(interval: Interval) -> list[list[float]] | None:
    """Return an interval's lengths below and above its value, as matplotlib's error bars take them."""
    if interval.value is None or interval.low is None or interval.high is None:
        return None
    return [[max(0.0, interval.value - interval.low)], [max(0.0, interval.high - interval.value)]]
