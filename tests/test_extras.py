"""Without an extra: one line that names it, from the verb that needs it, before anything is written."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scale_cli.commands.compare import compare
from scale_cli.commands.plan import plan
from scale_cli.commands.run import run_pipeline
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import RunConfig
from scale_cli.errors import EXTRA_OF, MissingExtraError
from scale_cli.evaluation.intervals import paired_differences
from tests.small_runs import petitions_run

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def config(shared_data: Path, tmp_path: Path) -> RunConfig:
    return petitions_run(shared_data, tmp_path / "run")


def test_every_library_is_in_the_extra_that_its_line_names_and_in_all() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}

    for module, extra in EXTRA_OF.items():
        assert module.replace("_", "-") in names(extras[extra])
        assert not names(extras[extra]) & names(project["dependencies"])
    # "quantised" slows every start.
    of_all = [extra for extra in dict.fromkeys(EXTRA_OF.values()) if extra != "quantised"]
    assert extras["all"] == [f"scale-cli[{','.join(of_all)}]"]
    assert "scale-cli[all,quantised]" in extras["dev"]


@pytest.mark.parametrize(
    ("module", "extra", "ask", "sections"),
    [
        *(
            (
                module,
                "eval",
                run_pipeline,
                {"evaluation": {"benchmarks": ["copa"]}},
            )
            for module in ("lm_eval", "scipy")
        ),
        ("peft", "lora", upscale, {"method": {"variant": "lora"}}),
        (
            "matplotlib",
            "report",
            lambda config: compare([config.output_dir], config.output_dir / "x"),
            {},
        ),
    ],
)
def test_what_needs_a_library_that_is_absent_is_refused_before_anything_is_written(
    module: str,
    extra: str,
    ask: Callable[[RunConfig], Any],
    sections: dict[str, Any],
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"scale-cli\[{extra}\]"):
        ask(RunConfig.model_validate(config.model_dump() | sections))
    assert not config.output_dir.exists()


def test_a_difference_has_its_interval_where_scipy_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    before_N, after_N = np.arange(9.0), np.arange(9.0)[::-1]
    (found,) = paired_differences(before_N, after_N[:, None], np.ones(9), num_resamples=99, seed=0)
    assert found.low is not None and found.high is not None and found.low < 0.0 < found.high


def test_a_plan_of_every_method_says_what_lora_lacks_where_peft_is_absent(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    planned = plan(config, flops=1e12, num_processes=1, compared=True)
    assert "scale-cli[lora]" in planned.refused["lora"]
    assert "full" in [method.variant for method in planned.methods]
