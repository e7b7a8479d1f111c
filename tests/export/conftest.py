"""Small trained runs: stories260K learns a few Korean petitions, once a session and method."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scale_cli.config.schema import RunConfig
from tests.small_runs import changed, petitions_run, train_run

TrainedRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def trained_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    runs: dict[str, RunConfig] = {}
    root = tmp_path_factory.mktemp("trained")

    def trained(method: dict[str, Any], dtype: str) -> RunConfig:
        key = f"{method}{dtype}"
        if key not in runs:
            config = petitions_run(shared_data, root / str(len(runs)), **method)
            runs[key] = train_run(changed(config, f"model.dtype={dtype}"))
        return runs[key]

    return trained


@pytest.fixture
def trained_run(trained_once: TrainedRun, tmp_path: Path) -> TrainedRun:
    """Return a function from a method (and the base's dtype, and an export section) to the config of a trained run."""

    def copied(method: dict[str, Any], base_dtype: str = "float32", **export: Any) -> RunConfig:
        config = trained_once(method, base_dtype)
        output_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(config.output_dir, output_dir)
        keys = [f"export.{key}={value}" for key, value in export.items()]
        return changed(config, f"output_dir={output_dir}", *keys)

    return copied
