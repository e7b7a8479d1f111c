"""Small trained runs on one base: two siblings, and one upon the first of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from tests.export.conftest import configured


def trained(shared_data: Path, folder: Path, base: str | None = None, **method: Any) -> RunConfig:
    """Train a run in seconds, on another base than stories260K where one is named."""
    config = configured(shared_data, folder, {"variant": "route", **method})
    if base is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"base": base})})
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
    """`korean` reads only, `writer` writes into the upper layers, `upon` stands upon korean."""
    folder = tmp_path_factory.mktemp("joined")
    korean = trained(shared_data, folder / "korean")
    writer = trained(
        shared_data, folder / "writer", collaboration={"layers": "top:2"}, expansion={"ratio": 0.5}
    )
    upon = trained(shared_data, folder / "upon", base=str(folder / "korean"))
    return {"korean": korean, "writer": writer, "upon": upon}
