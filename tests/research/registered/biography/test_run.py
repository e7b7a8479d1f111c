from pathlib import Path
from typing import Any

import pytest

from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.evaluation.results import HEADS
from scale_cli.storage.atomic import read_json
from scripts.research.biography.config import BiographyConfig, ComparedMethod
from scripts.research.biography.run import run_biography
from tests.command_line import refused

RIVALS: list[dict[str, Any]] = [
    {"name": "adept", "method": {"variant": "adept", "adept": {"every_steps": 2, "num_blocks": 1}}},
    {
        "name": "mer",
        "method": {"variant": "full"},
        "replay": 0.5,
        "lookahead": {"every_steps": 2, "share": 0.5},
    },
    {"name": "held", "method": {"variant": "full"}, "decay_to_base": 0.1, "weight_decay": 0},
]


def quietly(_line: str) -> None:
    pass


def with_rival(config: BiographyConfig, **rival: Any) -> BiographyConfig:
    method = ComparedMethod.model_validate({"lr": 1.0e-2, **rival})
    return config.model_copy(update={"methods": [*config.methods, method]})


def test_the_whole_benchmark_runs_is_not_run_twice_and_refuses_other_settings(
    small: BiographyConfig,
) -> None:
    for rival in RIVALS:
        small = with_rival(small, **rival)
    results = run_biography(small, quietly)
    for result in results:
        assert result.steps == [0, 2, 4, 5]
        for accuracy in (result.task_0, result.task_1):
            assert accuracy.keys() == set(HEADS)
            assert all(len(shares) == 4 for shares in accuracy.values())
            # Nothing is trained at step 0: both heads and both rules are the base.
            assert len({shares[0] for shares in accuracy.values()}) == 1
            assert len(set(accuracy["base"])) == 1  # and the base never changes
    report, names = (
        small.output_dir / "report",
        ["full", "route", *(rival["name"] for rival in RIVALS)],
    )
    assert "| route (posterior) |" in (report / "report.md").read_text()
    assert (report / "accuracy.svg").read_text().count("route (cosine)") == 1
    assert [method["name"] for method in read_json(report / "report.json")["methods"]] == names

    before = {
        file: file.stat().st_mtime_ns for file in Path(small.output_dir).glob("methods/*.json")
    }
    assert run_biography(small, quietly) == results
    assert before == {file: file.stat().st_mtime_ns for file in before}

    with pytest.raises(RunFolderError, match=r"other settings \(people\)"):
        run_biography(
            small.model_copy(update={"people": small.people.model_copy(update={"task_1": 2})}),
            quietly,
        )


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
    with refused(ConfigError, f"^methods: rival: {told}"):
        run_biography(with_rival(small, name="rival", method=method), quietly)
    assert not small.output_dir.exists()
