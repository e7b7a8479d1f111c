"""Runs that each began with what the one before had trained (`train.init_from`): what every stage learned and kept.

With R[i][j] the loss on corpus j after stage i (0 is the base): what a corpus has lost since it was learned is
R[T][j] - R[i][j] for the stage i that learned it, whose mean over the corpora of earlier stages is the backward
transfer (of losses: above 0 is forgotten), and what it has forgotten is R[T][j] less the least of R[.][j]. Lopez-Paz
and Ranzato 2017, https://arxiv.org/abs/1706.08840; Chaudhry et al. 2018, https://arxiv.org/abs/1801.10112.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scale_cli.comparison.runs import ComparedRun
from scale_cli.config.display_names import language_name
from scale_cli.report.numbers import number
from scale_cli.report.tables import Cell, Row, Table


@dataclass(frozen=True)
class Learned:
    """One held-out corpus over the stages, in bits per byte of what each of them serves; None is not finite."""

    corpus: str  # its name
    language: str  # of its text, as a code
    bits_per_byte: list[float | None]  # of the base, and after every stage
    learned_in: int  # the stage that lowered its loss most; 0 where the base knew it (the role retention)

    @property
    def lost_since(self) -> float | None:
        """What the last stage has above the one that learned it."""
        return _difference(self.bits_per_byte[-1], self.bits_per_byte[self.learned_in])

    @property
    def forgotten(self) -> float | None:
        """What the last stage has above the best."""
        return _difference(self.bits_per_byte[-1], min((r for r in self.bits_per_byte if r is not None), default=None))


@dataclass(frozen=True)
class Stages:
    """Runs in the order in which they were trained, one after another."""

    runs: list[ComparedRun]
    corpora: list[Learned]

    @property
    def learned(self) -> float | None:
        """The mean loss on what was learned, each corpus after its own stage."""
        return _mean([corpus.bits_per_byte[corpus.learned_in] for corpus in self.corpora if corpus.learned_in])

    @property
    def backward_transfer(self) -> float | None:
        """The mean of what corpora of earlier stages have lost since; above 0 is forgotten."""
        return _mean([corpus.lost_since for corpus in self.corpora if 0 < corpus.learned_in < len(self.runs)])

    @property
    def title(self) -> str:
        """The runs' names, in order."""
        return " → ".join(run.name for run in self.runs)

    def in_words(self) -> str:
        """Return what came of it in a line."""
        told = []
        if any(corpus.learned_in for corpus in self.corpora):
            told.append(f"learned to {number(self.learned, 4)} bits/byte on average, each corpus after its own stage")
        if any(0 < corpus.learned_in < len(self.runs) for corpus in self.corpora):
            told.append(f"since then {number(self.backward_transfer, 4, '+')} on those of earlier stages than the last")
        return f"Stages {self.title}: {'; '.join(told) or 'nothing was learned that is measured'}."

    def table(self) -> Table:
        """Return the loss on every corpus after every stage, and what has become of it."""
        names = ["base", *(run.name for run in self.runs)]
        rows: list[Row] = [
            [name, *(number(corpus.bits_per_byte[stage], 4) for corpus in self.corpora)]
            for stage, name in enumerate(names)
        ]
        rows += [
            ["learned in", *(names[corpus.learned_in] for corpus in self.corpora)],
            ["lost since", *(number(corpus.lost_since, 4, "+") for corpus in self.corpora)],
            ["above its best", *(number(corpus.forgotten, 4, "+") for corpus in self.corpora)],
        ]
        titles = [Cell("after"), *(Cell(c.corpus, f"{language_name(c.language)}, bits/byte") for c in self.corpora)]
        methods = ["base", *(run.method.variant for run in self.runs), "", "", ""]
        return Table(titles, rows, "l" + "r" * len(self.corpora), self.title, methods)

    def to_json(self) -> dict[str, Any]:
        """Return what report.json holds."""
        return {
            "runs": [run.name for run in self.runs],
            "learned": self.learned,
            "backward_transfer": self.backward_transfer,
            "corpora": {
                corpus.corpus: {
                    "bits_per_byte": corpus.bits_per_byte,
                    "learned_in": corpus.learned_in,
                    "lost_since": corpus.lost_since,
                    "forgotten": corpus.forgotten,
                }
                for corpus in self.corpora
            },
        }


def stages_of(runs: Sequence[ComparedRun]) -> list[Stages]:
    """Return every sequence of runs that began with one another's `final/`, by its last run."""
    by_content = {run.content_sha256: run for run in runs}
    begun = {run.name: by_content.get(run.begun_with_sha256 or "") for run in runs}
    last = [run for run in runs if begun[run.name] is not None and run not in begun.values()]
    found = []
    for run in last:
        path = [run]
        while (before := begun[path[0].name]) is not None:
            path.insert(0, before)
        found.append(Stages(path, [_learned(path, corpus.name) for corpus in path[0].report.corpora]))
    return found


def _learned(path: Sequence[ComparedRun], name: str) -> Learned:
    results = [run.report.corpus(name) for run in path]
    after = [result.heads[run.report.served].bits_per_byte for run, result in zip(path, results, strict=True)]
    losses = [results[0].heads["base"].bits_per_byte, *after]
    drops = [_difference(before, now) for before, now in zip(losses, after, strict=False)]
    known = [(drop, stage) for stage, drop in enumerate(drops, start=1) if drop is not None]
    learned_in = 0 if results[0].role == "retention" else max(known, default=(0.0, 0))[1]
    return Learned(name, results[0].language, losses, learned_in)


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite and len(finite) == len(values) else None
