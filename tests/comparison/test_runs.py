from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from scale_cli.comparison.runs import load_runs, setup_differences
from tests.comparison.finished_run import Made, write_run


def set_up(folder: Path, sources: list[dict[str, Any]], **train: Any) -> Path:
    """Write a finished run with these sources."""
    write_run(folder, Made(train=train))
    path = folder / "final" / "scale.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["corpus"]["sources"] = sources
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


def test_runs_set_up_otherwise_are_told_in_a_line_a_key_and_sources_by_their_names(tmp_path: Path) -> None:
    web = {"name": "web", "path": "web.txt", "language": "ko"}
    news = {"name": "news", "dataset": "some/news", "language": "ko", "max_documents": 7}
    old = {"name": "old", "path": "old.txt", "language": "en"}
    first = set_up(tmp_path / "first", [old, web])
    others = [
        set_up(tmp_path / "more", [web, news], max_hours=3.0, attention="eager"),
        set_up(tmp_path / "less", [{**web, "max_documents": 5, "weight": 2.0}], lr=2e-3),
        set_up(tmp_path / "alike", [web, old]),
    ]
    assert setup_differences(load_runs([first, *others])) == {
        "more": ["train.attention: not set -> 'eager'", "corpus.sources: news, old"],
        "less": ["train.lr: 0.001 -> 0.002", "corpus.sources: old, web"],
    }
