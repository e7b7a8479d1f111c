import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scale_cli.commands.verify import verify
from tests.torture.tiny_run import SAVED_STEPS, Runs, write_base_and_texts


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether this is `make torture`, and not the shortened form in the normal tests."""
    return bool(pytestconfig.getoption("--torture"))


@pytest.fixture(scope="session")
def examples(in_full: bool) -> Callable[[int, int], settings]:
    """A function from how many examples a fuzz has in full, and how many in short, to its settings."""

    def of(full: int, short: int) -> settings:
        return settings(
            max_examples=full if in_full else short,
            database=None,
            derandomize=not in_full,
            suppress_health_check=list(HealthCheck),
        )

    return of


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
