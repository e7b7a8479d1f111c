"""Small trained runs: stories260K learns a few Korean petitions, once a session and method."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from tests.small_runs import held_out
from tests.widening import lower_stories

TrainedRun = Callable[..., RunConfig]


def configured(
    shared_data: Path, output_dir: Path, method: dict[str, Any], dtype: str = "float32"
) -> RunConfig:
    english = shared_data / "en-tinystories" / "tinystories_val.txt"
    korean = {"path": str(shared_data / "ko-petitions" / "valid.txt.xz"), "language": "ko"}
    petitions = {"name": "petitions", **korean, "max_documents": 8}
    learned = {**korean, "name": "petitions-held-out", "role": "acquisition", "max_documents": 2}
    return RunConfig.model_validate(
        {
            "output_dir": output_dir,
            "model": {"base": str(lower_stories(shared_data)), "dtype": dtype},
            "method": method,
            "corpus": {
                "sequence_length": 64,
                "cache_dir": output_dir.parent / "tokens",
                "sources": [petitions],
            },
            "train": {"max_steps": 12, "global_batch_size": 4, "micro_batch_size": 4, "lr": 2e-3},
            "evaluation": {"perplexity": [held_out("tiny", english, max_documents=2), learned]},
            "export": {"format": "llama"},
        }
    )


@pytest.fixture(scope="session")
def trained_once(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    runs: dict[str, RunConfig] = {}
    root = tmp_path_factory.mktemp("trained")

    def trained(method: dict[str, Any], dtype: str) -> RunConfig:
        key = f"{method}{dtype}"
        if key not in runs:
            config = configured(shared_data, root / str(len(runs)), method, dtype)
            upscale(config)
            train(config, None, print)
            runs[key] = config
        return runs[key]

    return trained


@pytest.fixture
def trained_run(trained_once: TrainedRun, tmp_path: Path) -> TrainedRun:
    """Return a function from a method (and the base's dtype, and an export section) to the config of a trained run."""

    def copied(method: dict[str, Any], base_dtype: str = "float32", **export: Any) -> RunConfig:
        config = trained_once(method, base_dtype)
        output_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(config.output_dir, output_dir)
        return RunConfig.model_validate(
            config.model_dump()
            | {"output_dir": output_dir, "export": config.export.model_dump() | export}
        )

    return copied
