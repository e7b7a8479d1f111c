"""Small runs: the configs that tests of every room change, and what is trained of them."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError
from tests.widening import lower_stories

MakeConfig = Callable[..., RunConfig]

SMALLEST = """\
output_dir: runs/x
model: {base: some/model}
corpus:
  sources:
    - {name: news, path: news.txt, language: ko}
train: {max_steps: 10}
"""

EVALUATED = (
    SMALLEST
    + """\
evaluation:
  perplexity:
    - {name: tales, path: tales.txt, language: en, role: retention}
"""
)


def load_text(text: str, *overrides: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, newline="")
        return load_config(path, list(overrides))


def changed(config: RunConfig, *overrides: str) -> RunConfig:
    """Return a config with other values of some keys."""
    return load_text(dump_config(config), *overrides)


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(text, *overrides)
    return str(caught.value)


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


def petitions_run(shared_data: Path, output_dir: Path, **method: Any) -> RunConfig:
    """The config of a run of seconds: the lower layers of stories260K learn a few Korean petitions."""
    english = shared_data / "en-tinystories" / "tinystories_val.txt"
    korean = {"path": str(shared_data / "ko-petitions" / "valid.txt.xz"), "language": "ko"}
    return RunConfig.model_validate(
        {
            "output_dir": output_dir,
            "model": {"base": str(lower_stories(shared_data)), "dtype": "float32"},
            "method": {"variant": "route", **method},
            "corpus": {
                "sequence_length": 64,
                "cache_dir": output_dir.parent / "tokens",
                "sources": [{"name": "petitions", **korean, "max_documents": 8}],
            },
            "train": {"max_steps": 12, "global_batch_size": 4, "micro_batch_size": 4, "lr": 2e-3},
            "evaluation": {
                "perplexity": [
                    held_out("tiny", english, max_documents=2),
                    held_out("petitions-held-out", role="acquisition", max_documents=2, **korean),
                ]
            },
            "export": {"format": "llama"},
        }
    )


def train_run(config: RunConfig) -> RunConfig:
    """Upscale and train."""
    upscale(config)
    train(config, None, print)
    return config


def at_its_start(config: RunConfig) -> RunConfig:
    """Make a run that ends as it began, where what it learned is no matter."""
    upscale(config)
    shutil.copytree(config.output_dir / "upscaled", config.output_dir / "final")
    return config
