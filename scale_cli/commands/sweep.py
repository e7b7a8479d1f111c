"""The verb `scale sweep`: one config trained with several values of some keys, ranked by what it learned.

Every run is a folder of its own, named after its values: the same command goes on where it was stopped, and one with
further values runs those alone. The text it is ranked on, the config's held-out corpora of the role acquisition, should
be other text than what is reported in the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import Grid, Values, load_config, name_of
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import cache_dir
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.report import Table, number
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.records import RunFolder

_TITLES = ("values", "bits/byte", "base's text, bits/byte lost")


@dataclass(frozen=True)
class Trial:
    """One run, and what the head that it serves pays over all corpora of a role; None: not finite."""

    values: Values  # of the keys that are swept over
    folder: str  # of the run
    bits_per_byte: float | None = None  # on what it was to learn
    # against the base on what it was to keep; None too where no corpus has that role
    retention_bits_per_byte_lost: float | None = None
    failure: str | None = None  # what stopped its training, if anything


@dataclass(frozen=True)
class SweepSummary:
    """What came out, best first."""

    folder: Path
    trials: list[Trial]

    def lines(self) -> list[str]:
        return [*self.table().lines(), f"report: {self.folder / 'report.md'}"]

    def table(self) -> Table:
        rows = []
        for trial in self.trials:
            lost = trial.retention_bits_per_byte_lost
            cells = (number(trial.bits_per_byte, 4), "" if lost is None else number(lost, 4, "+"))
            rows.append((" ".join(trial.values), *(cells if trial.failure is None else ("stopped", ""))))
        return Table(_TITLES, rows, "lrr")


def sweep(path: Path, grid: Grid, log: Callable[[str], None]) -> SweepSummary:
    """Run a config with several values of some keys, and rank the runs; what is finished is not run again."""
    points = grid.points
    whole = load_config(path, grid.shared)
    if all(source.role == "retention" for source in whole.evaluation.perplexity):
        raise ConfigError("evaluation.perplexity: has no corpus of role acquisition to rank runs by")
    cache = f"corpus.cache_dir={json.dumps(str(cache_dir(whole)))}"
    configs = []
    for values in points:
        place = f"output_dir={json.dumps(str(whole.output_dir / name_of(values)))}"
        configs.append(load_config(path, [*grid.shared, *values, cache, place]))
        RunFolder(configs[-1].output_dir).check()
    made = SweepSummary(whole.output_dir / "report", [])
    for number_of_run, (values, config) in enumerate(zip(points, configs, strict=True), start=1):
        log(f"==== run {number_of_run} of {len(points)}: {' '.join(values)}")
        made.trials.append(_trial(values, config, log))
        made.trials.sort(key=lambda trial: (trial.bits_per_byte is None, trial.bits_per_byte))  # whatever their tokens
        with new_folder(made.folder) as partial:
            trials = [asdict(trial) for trial in made.trials]
            write_json(partial / "report.json", {"runs": len(points), "trials": trials})
            heading = f"# Sweep\n\n{len(trials)} of {len(points)} runs, best first, by the head that is served."
            write_text(partial / "report.md", f"{heading}\n\n{made.table().markdown()}\n")
    return made


def _trial(values: Values, config: RunConfig, log: Callable[[str], None]) -> Trial:
    folder = str(config.output_dir)
    try:
        report = run_pipeline(config, log, exported=False)
    except TrainingError as error:
        log(f"stopped: {error}")
        return Trial(values, folder, failure=str(error))
    assert report is not None, "one process is the main one"
    learned, kept = (
        [(corpus.num_bytes, corpus.heads[report.served]) for corpus in report.with_role(role)]
        for role in ("acquisition", "retention")
    )
    return Trial(
        values,
        folder,
        _mean([(num_bytes, head.bits_per_byte) for num_bytes, head in learned]),
        _mean([(num_bytes, head.bits_per_byte_difference.value) for num_bytes, head in kept]),
    )


def _mean(figures: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the mean of figures by bytes; None where one is not finite, or there is none."""
    finite = [(num_bytes, figure) for num_bytes, figure in figures if figure is not None]
    if not finite or len(finite) < len(figures):
        return None
    return sum(num_bytes * figure for num_bytes, figure in finite) / sum(num_bytes for num_bytes, _ in finite)
