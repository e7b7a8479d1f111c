"""Small runs: the one config that tests of every room change, and what they train of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig

MakeConfig = Callable[..., RunConfig]


def held_out(name: str, path: Path | str, role: str = "retention", **keys: Any) -> dict[str, Any]:
    """A text that is evaluated on."""
    return {"name": name, "path": str(path), "language": "en", "role": role, **keys}


def write_config(folder: Path, base: Path | str, name: str = "config", /, **sections: Any) -> Path:
    """Write a config of one step on a short text, and the text beside it.

    `sections` add to those that it has, or take the place of what they name.
    """
    news = folder / "news.txt"
    if not news.exists():
        news.write_text("Once upon a time there was a cat.\n\nThe cat was happy.\n")
    source = {"name": "news", "path": str(news), "language": "en"}
    tree: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"base": str(base)},
        "corpus": {"sequence_length": 16, "sources": [source]},
        "train": {"max_steps": 1, "global_batch_size": 1},
    }
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def small_run(folder: Path, base: Path | str, *overrides: str, **sections: Any) -> RunConfig:
    """The config of such a run, with overrides as a command line has them."""
    return load_config(write_config(folder, base, **sections), overrides)
