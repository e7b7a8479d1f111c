"""What an attacker brings: payloads that leave a mark, and folders tampered with, manifest and all."""

import os
import pickle
from pathlib import Path
from typing import Any

import yaml

from scale_cli.storage.atomic import file_sha256, json_sha256, read_json, write_json

REMOTE_MODEL = {
    "auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
}


class Evil:
    """What a pickle can do."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


def evil_pickle(canary: Path) -> bytes:
    return pickle.dumps(Evil(canary))


def evil_python(canary: Path) -> bytes:
    """A module that leaves its mark when it is imported, whatever class is asked of it."""
    return f"import os\nos.mkdir({str(canary)!r})\nclass Evil:\n    pass\n".encode()


def write_benchmark(folder: Path) -> dict[str, str]:
    """Write a task of one item; return the entry of evaluation.benchmarks that names it."""
    items = folder / "items.jsonl"
    if not items.exists():
        items.write_text('{"query": "One", "choices": ["cat", "dog"], "gold": 0}\n')
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(task))
    return {"name": "mine", "path": str(folder / "mine.yaml"), "language": "en"}


def reseal(folder: Path, *more: str) -> None:
    """Write the manifest that a folder would have, had it been written as it is now, with more names if need be."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    names = {*(file.relative_to(folder).as_posix() for file in files), *more} - {"manifest.json"}
    tree = read_json(folder / "manifest.json")
    sizes = {name: (folder / name).stat().st_size for name in names}
    tree["files"] = {
        name: {"bytes": size, "sha256": file_sha256(folder / name)} for name, size in sizes.items()
    }
    del tree["manifest_sha256"]
    write_json(folder / "manifest.json", tree | {"manifest_sha256": json_sha256(tree)})


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    write_json(path, (read_json(path) if path.exists() else {}) | changes)
