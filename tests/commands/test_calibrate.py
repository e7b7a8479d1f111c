from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scale_cli.commands.calibrate import Sample, choose_threshold

Values = npt.NDArray[np.float64]
LOSSES = hnp.arrays(np.float64, 30, elements=st.floats(0.0, 20.0))
COSINES = hnp.arrays(np.float64, 30, elements=st.floats(-0.999, 0.999))


@given(LOSSES, LOSSES, COSINES, LOSSES, LOSSES, COSINES)
def test_the_choice_is_never_worse_than_serving_one_head_alone(
    base: Values, adapted: Values, cosine: Values, base_2: Values, adapted_2: Values, cosine_2: Values
) -> None:
    retention, acquisition = Sample(base, adapted, cosine), Sample(base_2, adapted_2, cosine_2)
    calibration = choose_threshold(retention, acquisition)
    best = min(base.mean(), adapted.mean()) + min(base_2.mean(), adapted_2.mean())
    cost = calibration.chosen.retention + calibration.chosen.acquisition + best
    assert cost <= base.mean() + base_2.mean() + 1e-9
    assert cost <= adapted.mean() + adapted_2.mean() + 1e-9


def test_cosines_that_tell_the_languages_apart_are_found() -> None:
    rng = np.random.default_rng(0)
    english = Sample(np.full(500, 2.0), np.full(500, 6.0), rng.uniform(0.7, 0.9, 500))
    korean = Sample(np.full(500, 9.0), np.full(500, 3.0), rng.uniform(0.1, 0.5, 500))
    chosen = choose_threshold(english, korean).chosen
    assert 0.45 <= chosen.threshold <= 0.75
    assert chosen.retention + chosen.acquisition < 0.1 * (4.0 + 6.0)


def test_a_head_that_has_broken_is_never_chosen_for_its_tokens() -> None:
    rng = np.random.default_rng(0)
    broken = Sample(np.full(50, 2.0), np.full(50, np.inf), np.full(50, np.nan))
    whole = Sample(np.full(50, 9.0), np.full(50, 3.0), rng.uniform(0.1, 0.5, 50))
    chosen = choose_threshold(broken, whole).chosen
    assert chosen.retention == 0.0


def test_the_table_marks_one_line_and_names_the_key() -> None:
    rng = np.random.default_rng(0)
    sample = Sample(rng.random(50), rng.random(50), rng.uniform(-1, 1, 50))
    lines = choose_threshold(sample, sample).lines()
    assert sum("smallest sum" in line for line in lines) == 1
    assert lines[-1].startswith("set: method.router.threshold=")
