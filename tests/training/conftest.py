"""A small real run: stories260K learns a few Korean petitions, in seconds."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.runs.folder import TRAINED, RunFolder
from scale_cli.storage.atomic import load_tensors
from scale_cli.training import loop
from scale_cli.training.step import TakenStep, train_step
from tests.widening import lower_stories

MakeConfig = Callable[..., RunConfig]
_STARTS: dict[str, Path] = {}  # what was upscaled, by what decides it

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
def make_config(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> MakeConfig:
    """Return a function from an output folder's name and overrides to a config."""
    return configs_in(tmp_path, shared_data, tmp_path_factory.getbasetemp() / "tokens")


def configs_in(folder: Path, shared_data: Path, cache: Path) -> MakeConfig:
    """Return a function from an output folder's name and overrides to a config, both written below `folder`."""

    def make(name: str, *overrides: str) -> RunConfig:
        path = folder / f"{name}.yaml"
        base = lower_stories(shared_data)
        text = _YAML.format(base=base, shared=shared_data, output=folder / name, cache=cache)
        path.write_text(text)
        return load_config(path, list(overrides))

    return make


def upscaled(config: RunConfig) -> RunFolder:
    """Upscale; what was upscaled once alike is copied."""
    run, key = (
        RunFolder(config.output_dir),
        config.model_dump_json(include={"seed", "model", "method", "corpus"}),
    )
    if key in _STARTS and _STARTS[key].is_dir():
        shutil.copytree(_STARTS[key], run.upscaled)
    else:
        upscale(config)
        _STARTS[key] = run.upscaled
    return run


def finished(config: RunConfig, said: list[str] | None = None) -> RunFolder:
    """Upscale and train."""
    run = upscaled(config)
    train(config, None, (said if said is not None else []).append)
    return run


def go_on(config: RunConfig, *accepted: str) -> list[str]:
    """Train with `--resume auto`, and return what is said."""
    said: list[str] = []
    train(config, "auto", said.append, accepted)
    return said


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / TRAINED)


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def around_steps(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any, Callable[[], TakenStep]], Any]
) -> None:
    """Put something in the place of every step: it is given the steps done, the model, and the step to take."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return act(args[3].step, args[1], lambda: train_step(*args, **kwargs))

    monkeypatch.setattr(loop, "train_step", step)


def before_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any], object]) -> None:
    """Call something with the number of steps done and the model, before every step."""
    around_steps(monkeypatch, lambda done, model, take: (act(done, model), take())[1])
