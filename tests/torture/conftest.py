from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scale_cli.commands.verify import verify
from tests.torture.tiny_run import SAVED_STEPS, Runs, write_base_and_texts


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether this is `make torture`, and not the shortened form in the normal tests."""
    return bool(pytestconfig.getoption("--torture"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that nothing has happened to: `kept` with every one of its checkpoints, `whole` with the last two."""
    root = tmp_path_factory.mktemp("torture")
    write_base_and_texts(root, num_hidden_layers=2)
    runs = Runs(root, ("train.keep_checkpoints=9",))
    runs.do("upscale", "upscaled-once")
    runs.upscaled("kept")
    runs.do("train", "kept")
    whole = runs.copy("kept", "whole")
    for step in SAVED_STEPS[:-2]:
        shutil.rmtree(whole.checkpoint(step))
    runs.do("evaluate", "whole")  # which another evaluation replaces
    verify(whole.root)
    return Runs(root)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What exists only where an attack has come through."""
    return tmp_path / "canary"


@pytest.fixture
def base(shared_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_data / "ckpt-stories260K" / "hf", tmp_path / "base"))
