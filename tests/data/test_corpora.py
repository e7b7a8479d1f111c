"""Stages of a mixture, from the config to what is drawn, and where a longer run may go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import check_same_stages
from scale_cli.data.doubtful import num_readings
from scale_cli.errors import RunFolderError


def staged(max_steps: int) -> RunConfig:
    sources = [{"name": name, "path": f"{name}.txt", "language": "en"} for name in ("old", "new")]
    stages = [{"until": 0.5, "weights": {"new": 1.0}}, {"until": 1.0, "weights": {"old": 1.0, "new": 3.0}}]
    tree = {
        "output_dir": "run",
        "model": {"base": "none"},
        "corpus": {"sequence_length": 8, "sources": sources, "stages": stages},
        "train": {"max_steps": max_steps, "global_batch_size": 2},
    }
    return RunConfig.model_validate(tree)


def test_the_stages_of_a_run_end_at_their_shares_of_it_and_name_every_source() -> None:
    assert staged(10).corpus.mixture(10) == [(5, [0.0, 1.0]), (10, [1.0, 3.0])]


def test_how_often_a_source_is_read_is_counted_over_its_stages() -> None:
    config = staged(10)
    old, new = config.corpus.sources
    windows = [5 * 2 * 0.25, 5 * 2 * 1.0 + 5 * 2 * 0.75]
    assert [num_readings(config, old, 40), num_readings(config, new, 40)] == [n * 8 / 40 for n in windows]


def test_a_longer_run_goes_on_from_where_its_stages_would_have_been_the_same() -> None:
    check_same_stages(Path("step-5"), 5, staged(10), staged(20))
    check_same_stages(Path("step-9"), 9, staged(10), staged(10))
    with pytest.raises(RunFolderError, match=r"ended at step 5 would end at 10, and 6 are trained; .* of step 5 or be"):
        check_same_stages(Path("step-6"), 6, staged(10), staged(20))
