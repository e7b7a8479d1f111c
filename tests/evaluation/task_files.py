"""The tasks of configs/benchmarks, on the data that lies beside the repository."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import yaml

TASKS = Path(__file__).parents[2] / "configs" / "benchmarks"


def task_of(shared_data: Path, folder: Path, name: str, *, limit: int | None = None, **keys: Any) -> dict[str, Any]:
    """Write a task's file with some keys changed; return what evaluation.benchmarks takes."""
    text = (TASKS / f"{name}.yaml").read_text(encoding="utf-8").replace("../shared/data", str(shared_data))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(text) | keys), encoding="utf-8")
    language = "ko" if name.startswith("kobest") else "en"
    return {"name": name, "path": str(path), "language": language, "limit": limit}


def some_of_blimp(shared_data: Path, folder: Path, num_of_each: int | None, **keys: Any) -> dict[str, Any]:
    """The first pairs of each of BLiMP's paradigms, in one file."""
    lines: list[str] = []
    with zipfile.ZipFile(shared_data / "eval-blimp" / "BLiMP.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("data/") and name.endswith(".jsonl"):
                lines += archive.read(name).decode().splitlines()[:num_of_each]
    (folder / "blimp.jsonl").write_text("\n".join(lines), encoding="utf-8")
    task = task_of(shared_data, folder, "blimp", **keys)
    path = Path(task["path"])
    path.write_text(path.read_text(encoding="utf-8").replace("blimp.jsonl", str(folder / "blimp.jsonl")))
    return task
