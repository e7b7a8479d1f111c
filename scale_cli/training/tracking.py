"""Send the log to trackers through Accelerate (`log_with`), from where a run begins or resumes.

metrics.jsonl is the authoritative log. In a tracker, a resumed run is another run with the same
name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from accelerate import Accelerator
from tqdm import tqdm

from scale_cli.config.schema import RunConfig, leaves
from scale_cli.errors import ConfigError, one_line, require
from scale_cli.training.metrics_log import MetricsLog, MetricsRecord


def check_trackers(names: Sequence[str]) -> None:
    """Raise MissingExtraError if a tracker is not installed, before anything is written."""
    for name in names:
        require(name, f"train.trackers {name}")


@contextmanager
def tracked(log: MetricsLog | None, config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """Send the records of `log` (None except on the main process) to the trackers until the body
    ends.
    """
    if log is None or not config.train.trackers:
        yield
        return
    name = config.output_dir.resolve().name
    named = {"wandb": {"name": name, "dir": str(config.output_dir)}, "mlflow": {"run_name": name}}
    settings = {key: str(value) for key, value in leaves(config.model_dump(mode="json"))}
    try:
        accelerator.init_trackers(
            config.train.project, settings, {**named, "trackio": {"name": name}}
        )
    except Exception as error:  # whatever it raises
        raise ConfigError(f"train.trackers: {one_line(error)}") from None

    def send(record: MetricsRecord) -> None:
        try:
            accelerator.log(figures(record), step=int(record["step"]))
        except Exception as error:  # whatever it raises, training goes on
            log.listeners = []
            tqdm.write(
                f"warning: train.trackers: {one_line(error)}; the run goes on without them",
                file=sys.stderr,
            )

    log.listeners.append(send)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            with suppress(Exception):
                tracker.finish()


def figures(record: MetricsRecord) -> dict[str, float]:
    """Return a record's numbers by their places in it, such as
    `evaluation_nats_per_token/news/base`.
    """
    flat = ((key.replace(".", "/"), value) for key, value in leaves(record) if key != "step")
    return {
        key: value
        for key, value in flat
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
