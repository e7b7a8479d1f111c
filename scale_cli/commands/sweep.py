"""The verb `scale sweep`: train one config with several values of some keys, and rank the runs by what they learned.

Each run has its own folder, named after its values. The same command continues a stopped sweep; with further values
it runs only those. Runs are ranked on the config's held-out corpora of the role acquisition. Final results should be
reported on other text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import Grid, Values, load_config, name_of
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import cache_dir
from scale_cli.errors import ConfigError, TrainingError
from scale_cli.evaluation.results import CorpusResult
from scale_cli.report import Table, number
from scale_cli.storage.atomic import new_folder, write_json, write_text
from scale_cli.storage.records import RunFolder
from scale_cli.terminal import Log

_TITLES = ("values", "bits/byte", "base's text, bits/byte lost")


@dataclass(frozen=True)
class Trial:
    """One run, and its served head's loss on all corpora of each role; None if not finite."""

    values: Values  # of the keys that are swept over
    folder: str  # of the run
    bits_per_byte: float | None = None  # on the acquisition corpora
    # against the base on the retention corpora; also None if there are none
    retention_bits_per_byte_lost: float | None = None
    failure: str | None = None  # the error that stopped its training, if any

    def row(self) -> list[str]:
        if self.failure is not None:
            return [" ".join(self.values), "stopped", ""]
        lost = self.retention_bits_per_byte_lost
        return [
            " ".join(self.values),
            number(self.bits_per_byte, 4),
            "" if lost is None else number(lost, 4, "+"),
        ]


def sweep(path: Path, grid: Grid, log: Log) -> list[Trial]:
    """Run a config with several values of some keys, and rank the runs; skip finished runs."""
    points, whole = grid.points, load_config(path, grid.shared)
    if all(source.role == "retention" for source in whole.evaluation.perplexity):
        raise ConfigError(
            "evaluation.perplexity: has no corpus of role acquisition to rank the runs by; add one"
        )
    cache = f"corpus.cache_dir={json.dumps(str(cache_dir(whole)))}"
    configs = []
    for values in points:
        place = f"output_dir={json.dumps(str(whole.output_dir / name_of(values)))}"
        configs.append(load_config(path, [*grid.shared, *values, cache, place]))
        RunFolder(configs[-1].output_dir).check()
    trials: list[Trial] = []
    for values, config in zip(points, configs, strict=True):
        log(f"==== run {len(trials) + 1} of {len(points)}: {' '.join(values)}")
        trials.append(_trial(values, config, log))
        trials.sort(
            key=lambda trial: (trial.bits_per_byte is None, trial.bits_per_byte)
        )  # for any tokenizer
        table = Table(_TITLES, [trial.row() for trial in trials], "lrr")
        with new_folder(whole.output_dir / "report") as partial:
            write_json(
                partial / "report.json",
                {"runs": len(points), "trials": [asdict(trial) for trial in trials]},
            )
            heading = f"# Sweep\n\n{len(trials)} of {len(points)} runs, best first, by the head that is served."
            write_text(partial / "report.md", f"{heading}\n\n{table.markdown()}\n")
    for line in table.lines():
        log(line)
    log(f"report: {whole.output_dir / 'report' / 'report.md'}")
    return trials


def _trial(values: Values, config: RunConfig, log: Log) -> Trial:
    folder = str(config.output_dir)
    try:
        report = run_pipeline(config, log, exported=False)
    except TrainingError as error:
        log(f"stopped: {error}")
        return Trial(values, folder, failure=str(error))
    assert report is not None, "one process is the main one"
    learned, kept = report.with_role("acquisition"), report.with_role("retention")
    return Trial(
        values,
        folder,
        _mean(learned, [corpus.heads[report.served].bits_per_byte for corpus in learned]),
        _mean(
            kept, [corpus.heads[report.served].bits_per_byte_difference.value for corpus in kept]
        ),
    )


def _mean(corpora: Sequence[CorpusResult], figures: Sequence[float | None]) -> float | None:
    """Return the mean of the figures, weighted by bytes; None if one is not finite or there are none."""
    if not figures or None in figures:
        return None
    sizes = [corpus.num_bytes for corpus in corpora]
    return sum(
        size * figure for size, figure in zip(sizes, figures, strict=True) if figure is not None
    ) / sum(sizes)
