"""Run by the Python of an environment that has the trackers: prints what one of them holds on its own disk.

    tracked.py wandb|mlflow|trackio FOLDER PROJECT

As JSON: every run by its id, and of each every curve as pairs of step and value, in the order in which they were kept.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]


def in_wandb(folder: Path, _project: str) -> dict[str, Curves]:
    """Read the files that `wandb sync` would send, in their order."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run_id = file.stem.removeprefix("run-")
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                if not key.startswith("_"):
                    runs[run_id][key].append((row["_step"], value))
    return runs


def _records(data: bytes) -> Iterator[bytes]:
    """Read LevelDB's log format, which wandb writes behind seven bytes; a killed writer's end is cut off."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the end of a block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        at += 7 + length
        if kind == 0 or at > len(data):
            return
        parts += data[at - length : at]
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def in_mlflow(_folder: Path, project: str) -> dict[str, Curves]:
    """Ask the store that MLFLOW_TRACKING_URI names."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name(project)
    return {
        run.info.run_id: {
            key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        for run in client.search_runs([experiment.experiment_id])
    }


def in_trackio(_folder: Path, project: str) -> dict[str, Curves]:
    """Ask the store below TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    runs: dict[str, Any] = {}
    for name in SQLiteStorage.get_runs(project):
        runs[name] = defaultdict(list)
        for row in SQLiteStorage.get_logs(project, run=name):
            for key, value in row.items():
                if key not in ("timestamp", "step"):
                    runs[name][key].append((row["step"], value))
    return runs


if __name__ == "__main__":
    name, folder, project = sys.argv[1:]
    read = {"wandb": in_wandb, "mlflow": in_mlflow, "trackio": in_trackio}[name]
    print(json.dumps(read(Path(folder), project)))
