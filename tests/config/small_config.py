"""Small configs, written and read."""

import tempfile
from pathlib import Path

import pytest

from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError

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
