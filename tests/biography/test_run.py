from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.evaluation.results import HEADS
from scale_cli.storage.atomic import read_json
from scripts.biography.config import BiographyConfig, ComparedMethod
from scripts.biography.run import run_biography


def quietly(_line: str) -> None:
    pass


def test_the_whole_benchmark_runs_is_not_run_twice_and_refuses_other_settings(small: BiographyConfig) -> None:
    results = run_biography(small, quietly)
    full, route = results
    assert full.steps == route.steps == [0, 2, 4, 5]
    for result in results:
        for accuracy in (result.task_0, result.task_1):
            assert accuracy.keys() == set(HEADS)
            assert all(len(shares) == 4 for shares in accuracy.values())
            # Nothing is trained at step 0: both heads and both rules are the base.
            assert len({shares[0] for shares in accuracy.values()}) == 1
            assert len(set(accuracy["base"])) == 1  # and the base never changes
    report = small.output_dir / "report"
    assert "| route (posterior) |" in (report / "report.md").read_text(encoding="utf-8")
    assert (report / "accuracy.svg").read_text(encoding="utf-8").count("route (cosine)") == 1
    assert [method["name"] for method in read_json(report / "report.json")["methods"]] == ["full", "route"]

    before = {file: file.stat().st_mtime_ns for file in Path(small.output_dir).glob("methods/*.json")}
    assert run_biography(small, quietly) == results
    assert before == {file: file.stat().st_mtime_ns for file in before}

    with pytest.raises(RunFolderError, match=r"other settings \(people\)"):
        run_biography(small.model_copy(update={"people": small.people.model_copy(update={"task_1": 2})}), quietly)


RIVALS: list[dict[str, Any]] = [
    {"name": "adept", "method": {"variant": "adept", "adept": {"every_steps": 2, "num_blocks": 1}}},
    {"name": "mer", "method": {"variant": "full"}, "replay": 0.5, "lookahead": {"every_steps": 2, "share": 0.5}},
    {"name": "held", "method": {"variant": "full"}, "decay_to_base": True},
]


def test_every_rival_starts_as_the_base_and_is_measured_at_the_same_steps(small: BiographyConfig) -> None:
    rivals = [ComparedMethod.model_validate({"lr": 1.0e-2, **rival}) for rival in RIVALS]
    model = small.model.model_copy(update={"num_hidden_layers": 3})
    for result in run_biography(small.model_copy(update={"methods": rivals, "model": model}), quietly):
        assert result.steps == [0, 2, 4, 5]
        for accuracy in (result.task_0, result.task_1):
            assert accuracy["adapted"][0] == accuracy["base"][0]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"variant": "route", "collaboration": {"layers": [7]}}, "method.collaboration.layers"),
        ({"variant": "osf", "osf": {"targets": ["none"]}}, "method.osf"),
    ],
)
def test_a_method_that_the_base_cannot_have_is_refused_before_the_base_is_learned(
    small: BiographyConfig, method: dict[str, Any], told: str
) -> None:
    rival = ComparedMethod.model_validate({"name": "rival", "lr": 1.0e-2, "method": method})
    with pytest.raises(ConfigError, match=f"^methods: rival: {told}") as caught:
        run_biography(small.model_copy(update={"methods": [*small.methods, rival]}), quietly)
    assert "\n" not in str(caught.value)
    assert not small.output_dir.exists()
