import json
from pathlib import Path

import pytest
import yaml

from tests.serving_page import commands, run, write_small_config

# lm-eval's own task reads its data from the hub; this one reads the same kind of items from a file.
LOCAL_TASK = {
    "task": "arc_easy",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{query}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_small_config(folder, shared_data)
    return folder


def test_every_command_of_the_page_runs_as_written(folder: Path, shared_data: Path) -> None:
    plan, teach, use = commands("Teach it")
    assert "route" in run(plan, folder)
    assert "== export" in run(teach, folder)
    used = run(use, folder)
    assert "Once upon a time" in used
    assert "BAD" not in used
    exports, push = commands("Choose what to serve")
    assert run(exports, folder).count("parity") == 3, "the plain one routed too"
    assert "nothing was sent" in run(push, folder)
    for block in commands("transformers"):
        assert "Once upon a time" in run(block, folder)
    (evaluate,) = commands("lm-eval")
    rows = (shared_data / "eval-arc-easy" / "arc_easy.jsonl").read_text().splitlines()[:8]
    assert {"query", "choices", "gold"} <= json.loads(rows[0]).keys()
    (folder / "arc_easy.jsonl").write_text("\n".join(rows))
    task = LOCAL_TASK | {"dataset_kwargs": {"data_files": {"test": str(folder / "arc_easy.jsonl")}}}
    (folder / "tasks").mkdir()
    (folder / "tasks" / "arc_easy.yaml").write_text(yaml.safe_dump(task))
    told = run(f"{evaluate.strip()} --include_path tasks", folder, HF_HOME=str(folder / "hub"))
    assert "|arc_easy|" in told
