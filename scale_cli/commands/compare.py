"""The verb `scale compare`: read finished runs, and write one report of them all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_cli.comparison.report import KIND, Comparison, compare_runs, notes, write_comparison
from scale_cli.comparison.runs import load_runs, side_names
from scale_cli.errors import require
from scale_cli.report.numbers import DASH, with_interval
from scale_cli.report.tables import aligned
from scale_cli.storage.atomic import new_folder
from scale_cli.storage.layout import check_replaceable


@dataclass(frozen=True)
class ComparisonSummary:
    """What was compared, for the terminal."""

    folder: Path
    comparison: Comparison

    def lines(self) -> list[str]:
        rows = [
            [option.label, *(DASH if s.value is None else with_interval(s, 4) for s in (option.lost, option.gained))]
            for option in self.comparison.options
        ]
        return [
            *aligned([["", *side_names(self.comparison.runs[0].report)], *rows], "lll"),
            "bits/byte against the base [95 %]",
            *(f"note: {line}" for line in notes(self.comparison)),
            f"report: {self.folder / 'report.html'}",
        ]


def compare(folders: list[Path], output: Path) -> ComparisonSummary:
    """Compare finished runs, and write report.html, report.md, report.json and the figures."""
    require("matplotlib", "scale compare")
    check_replaceable(output, KIND)
    comparison = compare_runs(load_runs(folders))
    with new_folder(output) as partial:
        write_comparison(comparison, partial)
    return ComparisonSummary(output, comparison)
