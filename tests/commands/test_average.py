"""`scale average`: a mean of weights, which every verb takes as a run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scale_cli.commands.average import average
from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.export import export
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.commands.verify import verify
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.console import load
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.storage.atomic import load_tensors
from scale_cli.storage.layout import RunFolder
from tests.training.conftest import MakeConfig

SHORT = ("train.max_steps=3", "train.save_every_steps=1", "train.keep_checkpoints=9", "train.warmup_steps=0")


def run_of(config: RunConfig) -> RunFolder:
    upscale(config)
    train(config, None, lambda _: None)
    return RunFolder(config.output_dir)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "trained.safetensors")


def test_it_is_the_weighted_mean_and_is_evaluated_exported_and_verified(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run = run_of(make_config("run", *SHORT))
    members = [run.checkpoint(1), run.checkpoint(2), run.root]
    summary = average(members, tmp_path / "mean", [1, 1, 2])
    one, two, three = (tensors(folder) for folder in (run.checkpoint(1), run.checkpoint(2), run.final))
    for name, tensor in tensors(summary.folder).items():
        expected = (one[name].double() + two[name].double() + 2 * three[name].double()) / 4
        assert torch.equal(tensor, expected.float()), name
    said = json.loads((summary.folder / "average.json").read_text(encoding="utf-8"))["members"]
    assert [(member["step"], member["weight"]) for member in said] == [(1, 0.25), (2, 0.25), (3, 0.5)]
    config = load_config(summary.folder / "scale.yaml")
    assert config.output_dir == tmp_path / "mean"
    assert evaluate(load(tmp_path / "mean", [])).report.step == 3
    export(load_config(summary.folder / "scale.yaml", ["export.format=llama"]))
    card = (tmp_path / "mean" / "export" / "llama" / "README.md").read_text(encoding="utf-8")
    assert "; the mean of 3 such: step 1 (weight 0.25), step 2 (weight 0.25), step 3 (weight 0.5)" in card
    verify(config.output_dir).require()
    same = average([run.final, run.checkpoint(3)], tmp_path / "same", None)
    assert all(torch.equal(tensor, three[name]) for name, tensor in tensors(same.folder).items())


def test_what_cannot_be_averaged_is_refused_in_one_line(make_config: MakeConfig, tmp_path: Path) -> None:
    run = run_of(make_config("run", *SHORT))
    other = run_of(make_config("other", *SHORT, "method.expansion.ratio=0.5"))
    for given, weights, told in (
        ([run.final], None, "give two or more"),
        ([run.final, run.final], [1.0], "--weights: give 2"),
        ([run.upscaled, run.final], None, "upscaled: is neither a checkpoint"),
        ([run.final, other.final], None, r"another method than .*method.expansion.ratio: 0.25 -> 0.5"),
    ):
        with pytest.raises((ConfigError, RunFolderError), match=told) as caught:
            average(given, tmp_path / "mean", weights)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "mean").exists()
    with pytest.raises(RunFolderError, match="holds a run already"):
        average([run.final, run.final], other.root, None)
