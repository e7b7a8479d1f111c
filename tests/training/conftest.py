"""A small real run: stories260K learns a few Korean petitions, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from tests.widening import lower_stories

MakeConfig = Callable[..., RunConfig]

_YAML = """
model: {{base: {base}}}
method: {{variant: route, expansion: {{ratio: 0.25}}, collaboration: {{layers: 'top:1'}}}}
output_dir: {output}
corpus:
  sequence_length: 32
  cache_dir: {cache}
  sources:
    - {{name: petitions, path: {shared}/ko-petitions/valid.txt.xz, language: ko, max_documents: 8}}
    - {{name: tiny, path: {shared}/en-tinystories/tinystories_val.txt, language: en, max_documents: 30, weight: 0.5}}
train:
  max_steps: 9
  global_batch_size: 8
  micro_batch_size: 4
  lr: 3e-3
  warmup_steps: 2
  log_every_steps: 1
  save_every_steps: 3
evaluation:
  perplexity:
    - {{name: tiny, path: {shared}/en-tinystories/tinystories_val.txt, language: en, role: retention, max_documents: 4}}
"""


@pytest.fixture
def make_config(shared_data: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> MakeConfig:
    """Return a function from an output folder's name and overrides to a config."""
    return configs_in(tmp_path, shared_data, tmp_path_factory.getbasetemp() / "tokens")


def configs_in(folder: Path, shared_data: Path, cache: Path) -> MakeConfig:
    """Return a function from an output folder's name and overrides to a config, both written below `folder`."""

    def make(name: str, *overrides: str) -> RunConfig:
        path = folder / f"{name}.yaml"
        base = lower_stories(shared_data)
        text = _YAML.format(base=base, shared=shared_data, output=folder / name, cache=cache)
        path.write_text(text, encoding="utf-8")
        return load_config(path, list(overrides))

    return make
