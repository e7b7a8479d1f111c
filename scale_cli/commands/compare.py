"""The verb `scale compare`: finished runs on one page with one figure, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from scale_cli.comparison.figure import draw
from scale_cli.comparison.options import Option, options_of
from scale_cli.comparison.runs import ComparedRun, load_runs
from scale_cli.comparison.tables import benchmark_table, corpus_table, methods_table
from scale_cli.config.schema import differences
from scale_cli.errors import require
from scale_cli.evaluation.render import failures
from scale_cli.evaluation.results import BenchmarkResult
from scale_cli.report import aligned, render, with_interval
from scale_cli.runs.folder import check_replaceable
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.values import language_name

# The `kind` of report.json; a comparison may only replace a folder whose report has this kind.
KIND = "scale comparison"
FIGURE = "lost-and-gained.svg"
# Sections of the config whose differences are told; the base is the same.
_SHOWN_SECTIONS = ("seed", "corpus", "train", "router", "evaluation")


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one base, measured on the same corpora, and every way of serving each."""

    folder: Path  # where it is written
    runs: list[ComparedRun]

    @cached_property
    def options(self) -> list[Option]:
        return [option for run in self.runs for option in options_of(run)]

    @cached_property
    def sides(self) -> dict[str, str]:
        """What was measured, in words, by the field of an option that holds it."""
        sides = {}
        for role, side, words in (
            ("retention", "bits_per_byte_lost", "forgetting of"),
            ("acquisition", "bits_per_byte_gained", "gain in"),
        ):
            if corpora := self.runs[0].report.with_role(role):
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
            "options": [vars(option) | {"run": option.run.name} for option in self.options],
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
    """Compare finished runs, and write report.{json,md,html} and the figure."""
    require("matplotlib", "scale compare")
    check_replaceable(output, KIND)
    comparison = Comparison(output, load_runs(folders))
    options = comparison.options
    tables = [methods_table(options, comparison.sides)]
    tables += [corpus_table(options, corpus) for corpus in comparison.runs[0].report.corpora]
    if any(run.report.benchmarks for run in comparison.runs):
        tables.append(benchmark_table(options))

    # Runs that were measured by benchmarks alone have nothing to draw.
    drawn = draw(options, comparison.sides) if comparison.sides else ""
    with new_folder(output) as folder:
        if drawn:
            write_text(folder / FIGURE, drawn)
        for form in ("md", "html"):
            page = render(
                f"comparison.{form}.j2",
                comparison=comparison,
                notes=list(notes(comparison.runs)),
                tables=tables,
                figure=drawn,
                FIGURE=FIGURE,
            )
            write_text(folder / f"report.{form}", page)
        write_json(folder / "report.json", to_jsonable_python(comparison.to_json()))
    return comparison


def notes(runs: list[ComparedRun]) -> Iterator[str]:
    """Yield what a reader needs before comparing: what failed, text that is also trained on,
    unequal budgets and settings, missing figures.
    """
    for run in runs:
        yield from (f"{run.name}: {failure}" for failure in failures(run.report))
    for run in runs:
        for corpus in run.report.corpora:
            yield from (f"{run.name}: {corpus.name}: {shared}." for shared in corpus.shared)
        if not run.report.searched_training_text:
            yield f"{run.name}: held-out text was not looked for in the training text, which was gone."
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
        # Settings of two methods are not those of one; the tables say which methods they are.
        methods = {each.config.method.variant for each in (runs[0], run)}
        sections = (*_SHOWN_SECTIONS, "method") if len(methods) == 1 else _SHOWN_SECTIONS
        if changed := differences(runs[0].config, run.config, sections):
            told = "; ".join(changed).replace("None", "not set")
            yield f"{run.name} has other settings than {runs[0].name}: {told}."
    for run in runs[1:]:
        if others := run.other_texts(runs[0]):
            yield (
                f"{run.name} and {runs[0].name} do not have the same text, or did not read it in the "
                f"same way: {', '.join(others)}."
            )
    devices = [f"{run.cost.num_processes} x {run.cost.device}" for run in runs]
    if len(set(devices)) > 1:
        found = ", ".join(f"{run.name} {on}" for run, on in zip(runs, devices, strict=True))
        yield (
            "The runs were trained on different devices, so do not compare speed and memory: "
            f"{found}."
        )
    for run in runs[1:]:
        for benchmark in run.report.benchmarks:
            same = runs[0].report.benchmark(benchmark.name)
            if same and (bases := [_base_score(each) for each in (same, benchmark)])[0] != bases[1]:
                yield (
                    f"{benchmark.name}: the base has {bases[0]:.3f} in {runs[0].name} and {bases[1]:.3f} in "
                    f"{run.name}, so items, settings or precision differ; do not compare their differences."
                )
    for run in runs:
        for skipped in run.report.skipped_benchmarks:
            yield f"{run.name}: {skipped.name} was not measured ({skipped.reason})."


def _base_score(benchmark: BenchmarkResult) -> float:
    return float(benchmark.heads["base"].metrics[benchmark.judged_by].value or 0.0)
