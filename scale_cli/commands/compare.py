"""The verb `scale compare`: finished runs on one page with one figure; Markdown and JSON too."""

from __future__ import annotations

import io
import warnings
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from scale_cli.comparison import ComparedRun, Option, front, load_runs, options_of
from scale_cli.config.schema import differences
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
    number,
    quantity,
    render,
    verdict_of,
    with_interval,
)
from scale_cli.runs.folder import check_replaceable
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.values import language_name

# The `kind` of report.json; a comparison may only replace a folder whose report has this kind.
KIND = "scale comparison"
# Sections of the config whose differences are told; the base is the same.
_SHOWN_SECTIONS = ("seed", "corpus", "train", "evaluation")
_FIGURE = "lost-and-gained.svg"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # the reader's font has Hangul, matplotlib's does not
    "svg.hashsalt": "scale",
    "text.parse_math": False,  # a `$` in a run's name is not mathematics
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
}


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    folder: Path  # where it is written
    runs: list[ComparedRun]

    @cached_property
    def options(self) -> list[Option]:
        return [option for run in self.runs for option in options_of(run)]

    @cached_property
    def best(self) -> list[Option]:
        return front(self.options)

    @cached_property
    def sides(self) -> dict[str, str]:
        """What was measured, in words, by the field of an option that holds it."""
        report = self.runs[0].report
        sides = {}
        for role, side, words in (
            ("retention", "bits_per_byte_lost", "forgetting of"),
            ("acquisition", "bits_per_byte_gained", "gain in"),
        ):
            if corpora := report.with_role(role):
                languages = dict.fromkeys(language_name(corpus.language) for corpus in corpora)
                sides[side] = f"{words} {' and '.join(languages)}"
        return sides

    def lines(self) -> list[str]:
        rows = [
            [of.label, *(with_interval(getattr(of, side), 4) for side in self.sides)]
            for of in self.options
        ]
        return [
            *aligned([["", *self.sides.values()], *rows], "l" * (1 + len(self.sides))),
            "bits/byte against the base [95 %]",
            *(f"note: {line}" for line in notes(self.runs)),
            f"report: {self.folder / 'report.html'}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of report.json."""
        base = self.runs[0].base
        return {
            "kind": KIND,
            "base": {"name": base.name, "content_sha256": base.content_sha256},
            "notes": list(notes(self.runs)),
            "options": [
                vars(option) | {"run": option.run.name, "non_dominated": option in self.best}
                for option in self.options
            ],
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "method_in_words": run.config.method.in_words,
                    "method": run.config.method.model_dump(mode="json"),
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
    comparison = Comparison(output, load_runs(folders))
    drawn = draw(comparison)
    told = {
        "comparison": comparison,
        "notes": list(notes(comparison.runs)),
        "tables": tables(comparison),
        "figure": _FIGURE,
        "image": b64encode(drawn.encode()).decode(),
    }
    with new_folder(output) as folder:
        write_text(folder / _FIGURE, drawn)
        write_json(folder / "report.json", to_jsonable_python(comparison.to_json()))
        write_text(folder / "report.md", render("comparison.md.j2", **told))
        write_text(folder / "report.html", render("comparison.html.j2", **told))
    return comparison


def notes(runs: list[ComparedRun]) -> Iterator[str]:
    """Yield what a reader needs before comparing: unequal budgets and settings, missing figures."""
    if len({run.report.num_tokens_trained for run in runs}) > 1:
        spent = ", ".join(f"{run.name} {run.report.num_tokens_trained:,}" for run in runs)
        yield f"The runs were not trained on the same number of tokens: {spent}."
    grown = [run.name for run in runs if any(of.has_new_tokens for of in run.report.corpora)]
    if grown:
        yield (
            f"{', '.join(grown)}: with new tokens. Every difference is from the base by its own "
            "tokens, in bits/byte; figures per token are left out there."
        )
    for run in runs[1:]:
        if changed := differences(runs[0].config, run.config, _SHOWN_SECTIONS):
            told = "; ".join(changed).replace("None", "not set")
            yield f"{run.name} has other settings than {runs[0].name}: {told}."
    if len({(run.cost.device, run.cost.num_processes) for run in runs}) > 1:
        found = ", ".join(
            f"{run.name} {run.cost.num_processes} x {run.cost.device}" for run in runs
        )
        yield (
            "The runs were trained on different devices, so do not compare speed and memory: "
            f"{found}."
        )
    for run in runs:
        for benchmark in run.report.skipped_benchmarks:
            yield f"{run.name}: {benchmark.name} was not measured ({benchmark.reason})."


def tables(comparison: Comparison) -> list[Table]:
    """Return tables of the methods, of each corpus, and of the benchmarks if there are any."""
    corpora = comparison.runs[0].report.corpora
    found = [_methods_table(comparison)]
    found += [_corpus_table(comparison.options, corpus) for corpus in corpora]
    if any(run.report.benchmarks for run in comparison.runs):
        found.append(_benchmark_table(comparison))
    return found


def _methods_table(comparison: Comparison) -> Table:
    languages = dict.fromkeys(corpus.language for corpus in comparison.runs[0].report.corpora)
    titles = [
        Cell("method"),
        *(Cell(side, "bits/byte, 95 %") for side in comparison.sides.values()),
        Cell("by base head", f"% of {' / '.join(languages)}"),
        Cell("passes", "a token"),
        Cell("trainable", "parameters"),
        Cell("training", "tokens/s"),
        Cell("peak memory", "of training"),
    ]
    rows: list[Row] = []
    for option in comparison.options:
        is_best = option in comparison.best
        shares = option.base_share_by_language
        cost = option.run.cost
        in_words = f"{option.run.config.method.in_words}; served {option.served}"
        sides = [difference_cell(getattr(option, side)) for side in comparison.sides]
        rows.append(
            [
                Cell(option.label, in_words),
                *(replace(side, bold=is_best) for side in sides),
                " / ".join(f"{100 * shares[code]:.1f}" for code in languages) if shares else DASH,
                option.passes,
                quantity(cost.trainable_parameters),
                DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f}",
                quantity(cost.peak_memory_bytes, "B"),
            ]
        )
    return Table(
        titles, rows, "l" + "r" * (len(titles) - 1), "Methods", _variants(comparison.options)
    )


def _variants(options: list[Option]) -> list[str]:
    return [option.run.config.method.variant for option in options]


def _corpus_table(options: list[Option], corpus: CorpusResult) -> Table:
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
        head = result.heads[option.head]
        cells = (
            DASH if figure.per_token and result.has_new_tokens else figure.cell(head)
            for figure in shown
        )
        rows.append([option.label, number(result.bytes_per_token, 2), *cells])

    name = f"{corpus.name}: {language_name(corpus.language)}, {corpus.role} ({ROLES[corpus.role]})"
    align = "l" + "r" * (len(titles) - 1)
    return Table(titles, rows, align, name, ["base", *_variants(options)]).without_empty_columns()


def _benchmark_table(comparison: Comparison) -> Table:
    """Return the base's scores, and each option's difference from them."""
    measured = {result.name: result for run in comparison.runs for result in run.report.benchmarks}
    titles = [Cell("method")]
    base: list[str | Cell] = ["base"]
    for name, result in measured.items():
        titles.append(Cell(name, f"{language_name(result.language)}, {result.num_items:,} items"))
        base.append(number(result.heads["base"].metrics[result.judged_by].value))

    rows = [base]
    for option in comparison.options:
        row: list[str | Cell] = [option.label]
        for name in measured:
            result_of_run = option.run.report.benchmark(name)
            if result_of_run is None:
                row.append("not measured")
                continue
            head = result_of_run.heads[option.head]
            difference = with_interval(head.differences[result_of_run.judged_by])
            row.append(Cell(difference, verdict_of(head.p_holm)))
        rows.append(row)
    variants = ["base", *_variants(comparison.options)]
    return Table(titles, rows, "l" + "r" * len(measured), "Benchmarks", variants)


def draw(comparison: Comparison) -> str:
    """Return an SVG: what each option lost and gained, with intervals, a row an option."""
    from matplotlib import rc_context  # takes a second, and only the figure needs it
    from matplotlib.figure import Figure

    options = comparison.options
    written = io.StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure((8.0, 1.0 + 0.3 * len(options)), layout="constrained")
        panels = figure.subplots(1, len(comparison.sides), sharey=True, squeeze=False)[0]
        for axes, (side, title) in zip(panels, comparison.sides.items(), strict=True):
            axes.axvline(0.0, color=COLOURS["base"])
            for place, option in enumerate(options):
                variant = option.run.config.method.variant
                interval: Interval = getattr(option, side)
                if interval.value is None:
                    continue
                axes.plot(
                    interval.value,
                    place,
                    MARKS[variant][0],
                    color=COLOURS[variant],
                    mfc=COLOURS[variant] if option.num_models == 1 else "white",
                )
                if interval.low is not None and interval.high is not None:
                    axes.hlines(place, interval.low, interval.high, color=COLOURS[variant])
            axes.set(title=title, xlabel="bits/byte against the base")
        panels[0].set_yticks(range(len(options)), [option.label for option in options])
        panels[0].invert_yaxis()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
