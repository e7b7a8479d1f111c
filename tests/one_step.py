"""A config of one step on a short text."""

from pathlib import Path
from typing import Any

import yaml


def write_config(folder: Path, base: Path | str, **sections: Any) -> Path:
    """Write it beside its text; `sections` add to those that it has, or stand in the place of what they name."""
    news = folder / "news.txt"
    if not news.exists():
        news.write_text(
            "Once upon a time there was a cat.\n\nThe cat was happy.\n", encoding="utf-8"
        )
    source = {"name": "news", "path": str(news), "language": "en"}
    tree: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"base": str(base)},
        "corpus": {"sequence_length": 16, "sources": [source]},
        "train": {"max_steps": 1, "global_batch_size": 1},
    }
    tree |= {name: {**tree.get(name, {}), **keys} for name, keys in sections.items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "config.yaml"
