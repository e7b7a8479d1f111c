"""Trackers, by Accelerate's own classes, on the main process alone: fed from the records of metrics.jsonl.

That file stays the truth, and a resumed run is one run in its tracker, without gaps or repeats:

- TensorBoard's files are ours: they are written anew from the records that a resumed run keeps.
- Any other tracker has what it was sent. `tracking.json` says by which id, and how far; a killed run may have sent more
  than its last checkpoint knows, and that is not sent again: a resumed run computes the same figures, bit for bit.
- A killed run may also have sent what never came: trackio waits half a second, wandb for 32 KB. So a tracker that can
  tell what it holds is asked, and wandb's offline files, which nobody has seen before `wandb sync`, are written anew.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from tqdm import tqdm

from scale_cli.config.same_run import leaves
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError
from scale_cli.extras import require
from scale_cli.storage.atomic import read_json, write_json
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.metrics import BENCHMARKS, EVALUATION, MetricsLog, MetricsRecord, place_of, read_records

_TENSORBOARD = "tensorboard"
_TRACKIO_SERVERS = {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}
_Place = list[int | bool]  # as JSON has it
_NOTHING: _Place = [-1, False]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before anything is written."""
    for name in names:
        require(name, f"train.trackers {name}")


@contextmanager
def tracked(log: MetricsLog | None, config: RunConfig, step: int) -> Iterator[None]:
    """Send what is logged to every tracker that the config names, until the body ends.

    Args:
        log: opened at the step; None except on the main process.
        config: of the run.
        step: that the run goes on from; 0 begins another run in every tracker.
    """
    if log is None or not config.train.trackers:
        yield
        return
    file = RunFolder(config.output_dir).tracking
    state = read_json(file) if step and file.is_file() else {}
    started: dict[str, GeneralTracker] = {}

    def send(record: MetricsRecord) -> None:
        values = figures(record)
        for name in list(started):
            if not values or list(place_of(record)) <= state[name]["sent"]:
                continue
            try:
                started[name].log(values, step=int(record["step"]))
            except Exception as error:  # whatever it raises, training goes on
                tqdm.write(f"warning: train.trackers {name}: {error}; the run goes on without it", file=sys.stderr)
                del started[name]
                continue
            state[name]["sent"] = list(place_of(record))
            if name != _TENSORBOARD:
                write_json(file, state)

    try:
        for name in config.train.trackers:
            known = state.setdefault(name, {"id": None, "sent": _NOTHING})
            is_new = known["id"] is None
            started[name] = _started(name, config, known)
            # TensorBoard would make a run of its own of it; mlflow lets nothing of it be said anew.
            if name == "wandb" or (is_new and name != _TENSORBOARD):
                started[name].store_init_configuration(dict(leaves(config.model_dump(mode="json"))))
        write_json(file, state)
        for record in read_records(log.path):  # what a tracker that was added since has missed
            send(record)
        log.listeners.append(send)
        yield
    finally:
        for tracker in started.values():
            with suppress(Exception):
                tracker.finish()


def figures(record: MetricsRecord) -> dict[str, float]:
    """Return the numbers of a record by their places in it, `evaluation_nats_per_token/news/base`."""
    flat = ((key.replace(".", "/"), value) for key, value in leaves(record) if key != "step")
    return {key: value for key, value in flat if isinstance(value, int | float) and not isinstance(value, bool)}


def _started(name: str, config: RunConfig, known: dict[str, Any]) -> GeneralTracker:
    """Start a tracker, and note the id by which a resumed run finds it again."""
    folder, project = RunFolder(config.output_dir), config.train.project
    run_name = config.train.run_name or folder.root.resolve().name
    new_id = uuid.uuid4().hex[:12]
    tracker: Any
    if name == _TENSORBOARD:
        shutil.rmtree(folder.tensorboard, ignore_errors=True)
        known |= {"id": run_name, "sent": _NOTHING}
        tracker = TensorBoardTracker(run_name, logging_dir=folder.tensorboard)
    elif name == "wandb":
        known["id"] = known["id"] or new_id
        if _are_dropped(folder.root / "wandb", known["id"]):
            known["sent"] = _NOTHING
        tracker = WandBTracker(project, id=known["id"], name=run_name, resume="allow", dir=str(folder.root))
    elif name == "trackio":  # knows runs by their names
        known["id"] = known["id"] or f"{run_name}-{new_id}"
        tracker = TrackioTracker(project, name=known["id"], resume="allow")
    else:
        tracker = MLflowTracker(project, run_id=known["id"], run_name=run_name)
    try:
        tracker.start()
    except Exception as error:
        raise ConfigError(f"train.trackers {name}: {' '.join(str(error).split())}") from None
    if name == "mlflow":
        known["id"] = tracker.tracker.info.run_id
    if known["sent"] != _NOTHING and (held := _held(name, tracker.tracker, project)) is not None:
        known["sent"] = held
    return tracker


def _are_dropped(folder: Path, run_id: str) -> bool:
    """Drop wandb's offline files of a run, where none of them has been sent to a server; return whether that was so."""
    offline = list(folder.glob(f"offline-run-*-{run_id}"))
    if not offline or any(marker for one in offline for marker in one.glob("*.synced")):
        return False
    for one in offline:
        shutil.rmtree(one)
    return True


def _held(name: str, run: Any, project: str) -> _Place | None:
    """Return the place of the last record that a tracker holds of a run; None where it does not tell."""
    if name == "wandb":  # a step is there as a whole: it goes when the next one comes
        return [run.starting_step - 1, True] if run.resumed else None
    if name == "trackio":
        if _TRACKIO_SERVERS & os.environ.keys():
            return None
        from trackio.sqlite_storage import SQLiteStorage

        return max(
            (_place(row["step"], row) for row in SQLiteStorage.get_logs(project, run=run.name)), default=_NOTHING
        )
    if name == _TENSORBOARD:
        return None
    from mlflow import MlflowClient

    client, run_id = MlflowClient(), run.info.run_id
    held = [(key, client.get_metric_history(run_id, key)) for key in client.get_run(run_id).data.metrics]
    return max((_place(point.step, [key]) for key, points in held for point in points), default=_NOTHING)


def _place(step: int, keys: Iterable[str]) -> _Place:
    return [step, any(key.startswith((EVALUATION, BENCHMARKS)) for key in keys)]
