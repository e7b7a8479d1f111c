"""What an attacker brings: payloads that leave a mark, and folders tampered with, manifest and all."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import yaml

from scale_cli.storage.atomic import write_json


class Evil:
    """What a pickle can do."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


def evil_pickle(canary: Path) -> bytes:
    return pickle.dumps(Evil(canary))


def evil_python(canary: Path) -> str:
    """A module that leaves its mark when it is imported, whatever class is asked of it."""
    return f"import os\nos.mkdir({str(canary)!r})\nclass Evil:\n    pass\n"


def write_config(folder: Path, base: Path, news: Path | None = None, **changes: Any) -> Path:
    if news is None:
        news = folder / "news.txt"
        news.write_text("Once upon a time there was a cat.\n\nThe cat was happy.\n", encoding="utf-8")
    source = {"name": "news", "path": str(news), "language": "en"}
    tree = {
        "output_dir": str(folder / "run"),
        "model": {"base": str(base)},
        "corpus": {"sequence_length": 16, "sources": [source]},
        "train": {"max_steps": 2, "global_batch_size": 1, "micro_batch_size": 1, "save_every_steps": 1},
        "evaluation": {"perplexity": [source | {"role": "retention"}], "bootstrap_resamples": 100},
        **changes,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"


def write_benchmark(folder: Path, **changes: Any) -> dict[str, str]:
    """Write a task of one item; return the entry of evaluation.benchmarks that names it."""
    items = folder / "items.jsonl"
    if not items.exists():
        items.write_text('{"query": "One", "choices": ["cat", "dog"], "gold": 0}\n', encoding="utf-8")
    task = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **changes,
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return {"name": "mine", "path": str(folder / "mine.yaml"), "language": "en"}


def reseal(folder: Path) -> None:
    """Write the manifest that a folder would have, had it been written as it is now."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"]
    write_manifest(folder, {file.relative_to(folder).as_posix(): entry_of(file) for file in files})


def entry_of(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Put other files into a folder's manifest, and its own hash with them."""
    tree = json.loads((folder / "manifest.json").read_text(encoding="utf-8")) | {"files": entries}
    tree.pop("manifest_sha256", None)
    sha256 = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    write_json(folder / "manifest.json", tree | {"manifest_sha256": sha256})


def edit_json(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(tree | changes), encoding="utf-8")


def remote_model_of_a_known_family(base: Path, canary: Path) -> None:
    (base / "modeling_evil.py").write_text(evil_python(canary), encoding="utf-8")
    auto_map = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_json(base / "config.json", auto_map=auto_map)


def remote_model_of_its_own_family(base: Path, canary: Path) -> None:
    remote_model_of_a_known_family(base, canary)
    edit_json(base / "config.json", model_type="evil", architectures=["Evil"])
