"""Small trained runs on one base."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from tests.export.conftest import configured


def trained(shared_data: Path, folder: Path, **method: Any) -> RunConfig:
    """Train a run in seconds."""
    config = configured(shared_data, folder, {"variant": "route", **method})
    upscale(config)
    train(config, None, print)
    return config


def at_its_start(config: RunConfig) -> RunConfig:
    """Make a run that ends as it began, where what it learned is no matter."""
    upscale(config)
    shutil.copytree(config.output_dir / "upscaled", config.output_dir / "final")
    return config


@pytest.fixture(scope="session")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """`korean` and `wider` read only, `writer` writes into the upper layers."""
    folder = tmp_path_factory.mktemp("joined")
    korean = trained(shared_data, folder / "korean")
    writer = trained(
        shared_data, folder / "writer", collaboration={"layers": "top:2"}, expansion={"ratio": 0.5}
    )
    wider = trained(shared_data, folder / "wider", expansion={"ratio": 0.5})
    return {"korean": korean, "writer": writer, "wider": wider}
