"""Small runs: the configs that tests of every room change, and what is trained of them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scale_cli.commands.export import Exported, export_all
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


_ONE_STEP = """
output_dir: {folder}/run
model: {{base: {base}}}
corpus: {{sequence_length: 16, sources: [{{name: news, path: {folder}/news.txt, language: en}}]}}
train: {{max_steps: 1, global_batch_size: 1}}
"""


def write_config(folder: Path, base: Path | str, name: str = "config", /, **sections: Any) -> Path:
    """Write a config of one step on a short text, and the text beside it.

    `sections` add to those that it has, or take the place of what they name; a text is YAML.
    """
    news = folder / "news.txt"
    if not news.exists():
        news.write_text("Once upon a time there was a cat.\n\nThe cat was happy.\n")
    tree = yaml.safe_load(_ONE_STEP.format(folder=folder, base=base))
    for section, given in sections.items():
        keys = yaml.safe_load(given) if isinstance(given, str) else given
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def small_run(folder: Path, base: Path | str, *overrides: str, **sections: Any) -> RunConfig:
    """The config of such a run, with overrides as a command line has them."""
    return load_config(write_config(folder, base, **sections), overrides)


_PETITIONS = """
output_dir: {output}
model: {{base: {base}, dtype: float32}}
corpus:
  sequence_length: 64
  cache_dir: {cache}
  sources: [{{name: petitions, path: {korean}, language: ko, max_documents: 8}}]
train: {{max_steps: 12, global_batch_size: 4, micro_batch_size: 4, lr: 0.002}}
evaluation:
  perplexity:
    - {{name: tiny, path: {english}, language: en, role: retention, max_documents: 2}}
    - name: petitions-held-out
      path: {korean}
      language: ko
      role: acquisition
      max_documents: 2
export: {{format: plain}}
"""


def petitions_run(shared_data: Path, output_dir: Path, **method: Any) -> RunConfig:
    """The config of a run of seconds: the lower layers of stories260K learn a few petitions."""
    text = _PETITIONS.format(
        output=output_dir,
        cache=output_dir.parent / "tokens",
        base=lower_stories(shared_data),
        korean=shared_data / "ko-petitions" / "valid.txt.xz",
        english=shared_data / "en-tinystories" / "tinystories_val.txt",
    )
    tree = yaml.safe_load(text) | {"method": {"variant": "route", **method}}
    return RunConfig.model_validate(tree)


def train_run(config: RunConfig) -> RunConfig:
    """Upscale and train."""
    upscale(config)
    train(config, None, print)
    return config


def export(config: RunConfig) -> Exported:
    """Export a run in its config's only format."""
    (exported,) = export_all(config, None, dry_run=False)
    return exported
