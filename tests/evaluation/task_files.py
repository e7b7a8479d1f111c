"""Tasks of lm-eval on data that is here: those of configs/benchmarks, and small ones."""

import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import yaml
from lm_eval.tasks import TaskManager

from scale_cli.config.sources import BenchmarkSource
from scale_cli.evaluation import lm_eval_tasks
from scale_cli.evaluation.lm_eval_heads import open_benchmarks
from scale_cli.evaluation.lm_eval_tasks import Benchmark

TASKS = Path(__file__).parents[2] / "configs" / "benchmarks"
MEAN = {"aggregation": "mean", "higher_is_better": True}
ACCURACY = [{"metric": "acc", **MEAN}]


def task_of(
    shared_data: Path, folder: Path, name: str, *, limit: int | None = None, **keys: Any
) -> dict[str, Any]:
    """Write a task's file with some keys changed; return what evaluation.benchmarks takes."""
    text = (
        (TASKS / f"{name}.yaml")
        .read_text(encoding="utf-8")
        .replace("../shared/data", str(shared_data))
    )
    path = folder / f"{name}.yaml"
    path.write_text(text + yaml.safe_dump(keys) * bool(keys), encoding="utf-8")  # the later counts
    language = "ko" if name.startswith("kobest") else "en"
    return {"name": name, "path": str(path), "language": language, "limit": limit}


def some_of_blimp(shared_data: Path, folder: Path, num_of_each: int) -> dict[str, Any]:
    """The first pairs of each of BLiMP's paradigms, in one file."""
    lines: list[str] = []
    with zipfile.ZipFile(shared_data / "eval-blimp" / "BLiMP.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("data/") and name.endswith(".jsonl"):
                lines += archive.read(name).decode().splitlines()[:num_of_each]
    (folder / "blimp.jsonl").write_text("\n".join(lines), encoding="utf-8")
    task = task_of(shared_data, folder, "blimp")
    path = Path(task["path"])
    path.write_text(
        path.read_text(encoding="utf-8").replace("blimp.jsonl", str(folder / "blimp.jsonl"))
    )
    return task


def opened(task: Any) -> Benchmark:
    """Open one benchmark, which can be measured."""
    found = open_benchmarks([BenchmarkSource.model_validate(task)], trust_tasks=True)
    assert found.skipped == []
    (benchmark,) = found.ready
    return benchmark


def know_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder's YAML files all the tasks that lm-eval knows (its own take seconds)."""
    for constants in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        lm_eval_tasks,
        "_all_tasks",
        lambda: TaskManager(include_path=folder, include_defaults=False),
    )


def add_task(folder: Path, name: str, rows: list[dict[str, Any]], **keys: Any) -> None:
    """Write a task of multiple choice, or what `keys` say."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": ACCURACY,
    } | keys
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
