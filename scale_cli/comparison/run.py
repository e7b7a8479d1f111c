"""The verb `scale compare`: read finished runs, and write one report of them all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_cli.comparison.content import KIND, Comparison, comparison_of, figures, notes, side_titles, to_json
from scale_cli.comparison.markdown import markdown
from scale_cli.comparison.page import WIDE, page
from scale_cli.comparison.runs import load_runs
from scale_cli.comparison.words import with_interval
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.replaceable import check_replaceable


@dataclass(frozen=True)
class ComparisonSummary:
    """What was compared, for the terminal."""

    folder: Path
    comparison: Comparison

    def lines(self) -> list[str]:
        """Return a table of the options, and where the report lies."""
        titles = ("", *side_titles(self.comparison))
        rows = [titles] + [
            (option.label, *(_cell(with_interval(side), side.value) for side in (option.lost, option.gained)))
            for option in self.comparison.options
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        told = [f"note: {line}" for line in notes(self.comparison)]
        return [*lines, "bits/byte against the base [95 %]", *told, f"report: {self.folder / 'report.html'}"]


def _cell(text: str, value: float | None) -> str:
    return "—" if value is None else text


def compare(folders: list[Path], output: Path) -> ComparisonSummary:
    """Compare finished runs, and write report.html, report.md, report.json and the figures.

    Args:
        folders: of the runs, in the order in which they are to be shown.
        output: a new folder, or an earlier comparison, which is replaced.

    Raises:
        RunFolderError: a run is not finished or cannot be compared, or `output` holds something else.
    """
    check_replaceable(output, KIND)
    comparison = comparison_of(load_runs(folders))
    with new_folder(output) as partial:
        write_json(partial / "report.json", to_json(comparison))
        write_text(partial / "report.md", markdown(comparison))
        write_text(partial / "report.html", page(comparison))
        for figure in figures(comparison):
            if figure.draw is not None:
                write_text(partial / f"{figure.key}.svg", figure.draw(WIDE).standalone(figure.title))
    return ComparisonSummary(output, comparison)
