"""Small trained runs on one base."""

from pathlib import Path
from typing import Any

import pytest

from scale_cli.config.schema import RunConfig
from tests.small_runs import petitions_run, train_run


@pytest.fixture(scope="session")
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """`korean` and `wider` read only, `writer` writes into the upper layers."""
    folder = tmp_path_factory.mktemp("joined")
    methods: dict[str, dict[str, Any]] = {
        "korean": {},
        "writer": {"collaboration": {"layers": "top:2"}, "expansion": {"ratio": 0.5}},
        "wider": {"expansion": {"ratio": 0.5}},
    }
    return {
        name: train_run(petitions_run(shared_data, folder / name, **method))
        for name, method in methods.items()
    }
