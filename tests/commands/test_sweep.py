"""`scale sweep`: which runs it makes of a config, how it ranks them, and that none is run again."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.commands import sweep as sweeping
from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import load_config, name_of, parse_grid
from scale_cli.config.schema import RunConfig
from scale_cli.errors import ConfigError, NonFiniteError
from scale_cli.storage.atomic import read_json
from tests.one_step import write_config
from tests.torture.tiny_run import write_base_and_texts


@pytest.fixture
def config(tmp_path: Path) -> Path:
    source = {"name": "one", "path": str(tmp_path / "one.txt"), "language": "ko"}
    held_out = {
        "name": "held",
        "path": str(tmp_path / "held-out.txt"),
        "language": "ko",
        "role": "acquisition",
    }
    write_base_and_texts(tmp_path)
    sections: dict[str, Any] = {
        "method": {"variant": "full"},
        "corpus": {"sources": [source]},
        "train": {"max_steps": 2, "global_batch_size": 4},
        "evaluation": {"bootstrap_resamples": 100, "perplexity": [held_out]},
    }
    return write_config(tmp_path, tmp_path / "base", **sections)


def swept(config: Path, *arguments: str) -> list[sweeping.Trial]:
    return sweeping.sweep(config, parse_grid(arguments, paired=False), lambda _: None)


def test_runs_rank_by_what_they_learned_and_none_is_run_again(config: Path, tmp_path: Path) -> None:
    trials = swept(config, "train.lr=1e-5,1e-2", "train.max_steps=3")
    assert [trial.values for trial in trials] == [("train.lr=0.01",), ("train.lr=1e-05",)]
    for trial in trials:
        measured = read_json(Path(trial.folder) / "evaluation" / "report.json")["corpora"][0][
            "heads"
        ]["adapted"]
        assert trial.bits_per_byte == pytest.approx(measured["bits_per_byte"])
        assert load_config(Path(trial.folder) / "final" / "scale.yaml").train.max_steps == 3
    written = {path: path.stat().st_ino for path in (tmp_path / "run").glob("lr=*/*/*.safetensors")}
    more = swept(config, "train.lr=1e-5,1e-2,1e-3", "train.max_steps=3")
    assert {trial.values for trial in more} > {trial.values for trial in trials}
    assert written and all(path.stat().st_ino == inode for path, inode in written.items())
    report = read_json(tmp_path / "run" / "report" / "report.json")
    assert [tuple(trial["values"]) for trial in report["trials"]] == [
        trial.values for trial in more
    ]


def test_a_run_that_cannot_go_on_ranks_last_and_the_others_run(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops_at_a_high_rate(config: RunConfig, say: Any, **options: Any) -> Any:
        if config.train.lr > 1.0:
            raise NonFiniteError("step 2: loss is nan")
        return run_pipeline(config, say, **options)

    monkeypatch.setattr("scale_cli.commands.sweep.run_pipeline", stops_at_a_high_rate)
    first, last = swept(config, "train.lr=10,1e-3")
    assert (first.failure, last.failure) == (None, "step 2: loss is nan")


def test_without_a_text_to_rank_by_nothing_is_run(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no corpus of role acquisition to rank the runs by"):
        swept(config, "train.lr=1,2", "evaluation.perplexity.0.role=retention")
    assert not (tmp_path / "run").exists()


@given(
    st.lists(
        st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=4, unique=True), min_size=1, max_size=3
    )
)
def test_every_combination_is_a_run_of_a_name_of_its_own(axes: list[list[float]]) -> None:
    keys = [
        f"train.{name}={','.join(map(repr, values))}"
        for name, values in zip("abc", axes, strict=False)
    ]
    grid = parse_grid(["seed=1", "method.lora.targets=[q_proj, v_proj]", *keys], paired=False)
    assert grid.shared == ["seed=1", "method.lora.targets=[q_proj, v_proj]"]
    assert (
        len(grid.points)
        == len({name_of(values) for values in grid.points})
        == math.prod(map(len, axes))
    )


@pytest.mark.parametrize("value", ["1", "-2.5", "1e-05", "true", "null"])
def test_a_text_that_reads_as_another_value_has_a_name_of_its_own(value: str) -> None:
    (bare,), (text,), (word,) = parse_grid(
        [f'train.optimiser={value},"{value}",muon'], paired=False
    ).points
    names = [name_of((values,)) for values in (bare, text, word)]
    assert (
        len(set(names)) == 3 and names[0] == f"optimiser={value}" and names[2] == "optimiser=muon"
    )


def test_paired_values_are_taken_together() -> None:
    grid = parse_grid(["train.optimiser=muon,adamw", "train.lr=2e-2,1e-3"], paired=True)
    assert grid.points == [
        ('train.optimiser="muon"', "train.lr=0.02"),
        ('train.optimiser="adamw"', "train.lr=0.001"),
    ]
    assert name_of(grid.points[0]) == "optimiser=muon_lr=0.02"
    assert parse_grid(["a=1,1", "b=1,2"], paired=True).points == [("a=1", "b=1"), ("a=1", "b=2")]
    assert parse_grid(["a=2024-01-01,x"], paired=False).points == [('a="2024-01-01"',), ('a="x"',)]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["a=1,2", "b=1,2,3"], "more values"),
        (["a=1", "b=[1, 2]"], "nothing to sweep over"),
        (["a=1,2", "a=3,4"], "^a: given twice"),
        (["a=1,2", "a=3"], "^a: given twice"),
        (["a=1,1", "b=2,2"], "^a=1 b=2: these values are given twice"),
        (["output_dir=x,y"], "^output_dir: a sweep gives each run its own"),
    ],
)
def test_a_sweep_that_would_not_be_what_it_says_is_refused(
    arguments: list[str], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        parse_grid(arguments, paired=True)
