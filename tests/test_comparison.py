from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.commands.compare import compare_runs
from scale_cli.comparison import Option, front, load_runs, mean_interval, non_dominated, setup_differences
from scale_cli.report import Interval
from tests.finished_run import Made, write_run

# Few distinct values, so that ties and equals come up.
POINTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    no_worse = one[0] <= other[0] and one[1] >= other[1]
    return no_worse and (one[0] < other[0] or one[1] > other[1])


@given(POINTS)
def test_no_kept_point_is_dominated_and_every_other_is_by_a_kept_one(points: list[tuple[float, float]]) -> None:
    kept = non_dominated(points)
    front_points = [point for point, keep in zip(points, kept, strict=True) if keep]
    assert front_points
    assert not any(beats(other, point) for point in front_points for other in points)
    dropped = [point for point, keep in zip(points, kept, strict=True) if not keep]
    assert all(any(beats(other, point) for other in front_points) for point in dropped)


def options(tmp_path: Path, *made: Made) -> list[Option]:
    folders = [write_run(tmp_path / f"{index}-{m.variant}", m) for index, m in enumerate(made)]
    return compare_runs(load_runs(folders), tmp_path / "out").options


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("full", [("adapted", 1, "1"), ("posterior", 2, "2")]),
        ("llama-pro", [("adapted", 1, "1"), ("posterior", 2, "2")]),
        ("preserve", [("adapted", 1, "1"), ("posterior", 1, "1")]),
        ("adapt", [("adapted", 1, "1"), ("posterior", 1, "1 + 4/4")]),
        ("route", [("posterior", 1, "1 + 1/4")]),
    ],
)
def test_only_methods_that_widen_nothing_need_a_second_model_to_be_mixed(
    tmp_path: Path, variant: str, expected: list[tuple[str, int, str]]
) -> None:
    assert [(o.head, o.num_models, o.passes) for o in options(tmp_path, Made(variant=variant))] == expected


def test_the_front_leaves_out_what_the_base_itself_beats_and_what_is_not_finite(tmp_path: Path) -> None:
    found = options(tmp_path, Made("full", 0.4, 0.9), Made("preserve", 0.1, -0.2), Made("lora", None, None))
    alone = [option for option in found if option.head == "adapted"]
    assert [option.label for option in front(alone, 2)] == ["0-full"]


FINITE = st.floats(-10, 10)


@given(st.lists(st.tuples(FINITE, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_a_mean_lies_in_its_interval_and_one_corpus_keeps_its_own(parts: list[tuple[float, float, float]]) -> None:
    intervals = [Interval(value, value - below, value + above) for value, below, above in parts]
    mean = mean_interval(intervals)
    assert mean.value is not None
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low <= mean.value <= mean.high
    # Never wider than if all corpora erred together.
    assert mean.high - mean.value <= sum(above for *_, above in parts) / len(parts) + 1e-6
    if len(parts) == 1:
        assert (mean.low, mean.high) == pytest.approx((intervals[0].low, intervals[0].high))
    opposite = -mean
    assert -opposite == mean


def test_a_part_that_is_not_finite_leaves_no_mean() -> None:
    nothing = Interval(None, None, None)
    assert mean_interval([Interval(1.0, 0.5, 1.5), nothing]) == nothing
    assert mean_interval([]) == nothing
    assert mean_interval([Interval(1.0, None, None)]) == Interval(1.0, None, None)


def test_runs_of_other_tokens_are_held_against_the_base_in_its_own(tmp_path: Path) -> None:
    grown = Made("full", 0.4, 0.5, new_tokens=64, base_bits=1.9)
    own, other = (option for option in options(tmp_path, grown, Made("preserve", 0.1, 0.7)) if option.head == "adapted")
    assert astuple(own.lost) == pytest.approx((0.4, 0.39, 0.41))
    assert astuple(other.lost) == pytest.approx((0.1, 0.09, 0.11))
    assert astuple(other.gained) == pytest.approx((0.7, 0.69, 0.71))
    # 2.6 of the base in its own tokens, 1.9 - 0.5 of the trained head: two means, of which no interval is known.
    assert own.gained.value == pytest.approx(1.2)
    assert (own.gained.low, own.gained.high) == (None, None)
    (alone, _) = options(tmp_path / "alone", grown)
    assert astuple(alone.gained) == pytest.approx((0.5, 0.49, 0.51))


def set_up(folder: Path, sources: list[dict[str, Any]], **train: Any) -> Path:
    """Write a finished run with these sources."""
    write_run(folder, Made(train=train))
    path = folder / "final" / "scale.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["corpus"]["sources"] = sources
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


def test_runs_set_up_otherwise_are_told_in_a_line_a_key_and_sources_by_their_names(tmp_path: Path) -> None:
    web = {"name": "web", "path": "web.txt", "language": "ko"}
    news = {"name": "news", "dataset": "some/news", "language": "ko", "max_documents": 7}
    old = {"name": "old", "path": "old.txt", "language": "en"}
    first = set_up(tmp_path / "first", [old, web])
    others = [
        set_up(tmp_path / "more", [web, news], max_hours=3.0, attention="eager"),
        set_up(tmp_path / "less", [{**web, "max_documents": 5, "weight": 2.0}], lr=2e-3),
        set_up(tmp_path / "alike", [web, old]),
    ]
    assert setup_differences(load_runs([first, *others])) == {
        "more": ["train.attention: not set -> 'eager'", "corpus.sources: news, old"],
        "less": ["train.lr: 0.001 -> 0.002", "corpus.sources: old, web"],
    }
