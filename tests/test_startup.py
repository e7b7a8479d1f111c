from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import startup_steps

HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "numpy",
    "pyarrow",
    "scipy",
    "matplotlib",
}
# What takes a tenth of a second or more, is not imported by transformers itself, and is used by few runs.
RARE = {"peft", "scipy.stats", "matplotlib", "lm_eval", "datasets", "pandas", "sklearn"}


@pytest.fixture(scope="module")
def imported_after() -> dict[str, set[str]]:
    command = [sys.executable, startup_steps.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {step: set(names) for step, names in json.loads(done.stdout).items()}


@pytest.mark.parametrize("step", ["help", "a bad config"])
def test_nothing_heavy_is_imported_for(step: str, imported_after: dict[str, set[str]]) -> None:
    assert "typer" in imported_after[step]
    assert not imported_after[step] & HEAVY


def test_finished_runs_are_compared_without_torch(imported_after: dict[str, set[str]]) -> None:
    assert "scale_cli.commands.compare" in imported_after["compare"]
    assert not imported_after["compare"] & {"torch", "transformers", *RARE}


@pytest.mark.parametrize("verb", startup_steps.VERBS)
def test_a_verb_imports_what_few_runs_use_only_when_it_is_used(verb: str, imported_after: dict[str, set[str]]) -> None:
    assert not imported_after[verb] & RARE
