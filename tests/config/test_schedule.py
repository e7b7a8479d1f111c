from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler
from transformers import get_wsd_schedule

from scale_cli.config.schedule import SCHEDULES, learning_rate
from scale_cli.config.training import TrainConfig

DECAYING = ("cosine", "linear")


@st.composite
def trains(draw: st.DrawFn, /, **fixed: Any) -> TrainConfig:
    max_steps = draw(st.integers(1, 60))
    fields: dict[str, Any] = {
        "max_steps": max_steps,
        "warmup_steps": draw(st.integers(0, max_steps)),
        "lr": draw(st.floats(1e-8, 1.0)),
        "min_lr_ratio": draw(st.floats(0.0, 1.0)),
        "schedule": draw(st.sampled_from(sorted(SCHEDULES))),
    }
    fields |= {name: draw(value) for name, value in fixed.items()}
    if fields["schedule"] == "wsd":
        fields["decay_steps"] = draw(st.none() | st.integers(0, fields["max_steps"] - fields["warmup_steps"]))
    return TrainConfig.model_validate(fields)


def rates(train: TrainConfig) -> list[float]:
    return [learning_rate(step, train) for step in range(train.max_steps)]


def of_torch(schedule: Callable[..., LRScheduler], lr: float, num_steps: int, **options: Any) -> list[float]:
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = schedule(optimiser, **options)
    found = []
    for _ in range(num_steps):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return found


ONE_STEP = TrainConfig(max_steps=1, lr=0.5)
ALL_WARMUP = TrainConfig(max_steps=7, warmup_steps=7, lr=0.5)


@settings(deadline=None, max_examples=100)
@given(trains())
@example(ONE_STEP)
@example(ALL_WARMUP)
def test_the_rate_climbs_in_equal_steps_to_lr_never_rises_after_and_never_falls_below_its_minimum(
    train: TrainConfig,
) -> None:
    found = rates(train)
    warmup, after = found[: train.warmup_steps], found[train.warmup_steps :]
    assert warmup == pytest.approx([train.lr * (i + 1) / train.warmup_steps for i in range(train.warmup_steps)])
    assert all(later > earlier for earlier, later in pairwise(warmup))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    if train.schedule != "wsd":  # whose first step is the first on a way down from lr
        assert after[:1] in ([], [pytest.approx(train.lr)])
    assert all(0.0 < rate <= train.lr * (1 + 1e-12) for rate in found[:-1])
    assert all(train.lr * train.min_lr_ratio * (1 - 1e-12) <= rate <= train.lr * (1 + 1e-12) for rate in after)


@settings(deadline=None, max_examples=100)
@given(trains(schedule=st.sampled_from([*DECAYING, "constant"])))
@example(TrainConfig(max_steps=2, lr=0.5))
def test_a_decay_of_two_steps_or_more_ends_at_the_minimum_and_a_constant_rate_is_one(train: TrainConfig) -> None:
    last = rates(train)[-1]
    if train.schedule != "constant" and train.max_steps - train.warmup_steps >= 2:
        assert last == pytest.approx(train.lr * train.min_lr_ratio, abs=train.lr * 1e-12)
    else:
        assert last == pytest.approx(train.lr)


@settings(deadline=None, max_examples=60)
@given(trains(schedule=st.sampled_from(DECAYING)))
def test_warm_up_and_decay_are_those_of_torch(train: TrainConfig) -> None:
    found = rates(train)
    num_decay = train.max_steps - train.warmup_steps
    if train.warmup_steps >= 2:
        options: dict[str, Any] = {"start_factor": 1 / train.warmup_steps, "total_iters": train.warmup_steps - 1}
        warmup = of_torch(LinearLR, train.lr, train.warmup_steps, **options)
        assert found[: train.warmup_steps] == pytest.approx(warmup)
    if num_decay >= 2:
        if train.schedule == "cosine":
            options = {"T_max": num_decay - 1, "eta_min": train.lr * train.min_lr_ratio}
            decay = of_torch(CosineAnnealingLR, train.lr, num_decay, **options)
        else:
            options = {"start_factor": 1.0, "end_factor": train.min_lr_ratio, "total_iters": num_decay - 1}
            decay = of_torch(LinearLR, train.lr, num_decay, **options)
        # Torch multiplies its way from step to step, and carries the rounding along.
        assert found[train.warmup_steps :] == pytest.approx(decay, rel=1e-6, abs=train.lr * 1e-9)


@settings(deadline=None, max_examples=100)
@given(trains(schedule=st.just("wsd")))
def test_a_schedule_in_phases_ends_at_its_minimum_and_is_constant_between(train: TrainConfig) -> None:
    found = rates(train)
    if train.decay_steps:
        assert found[-1] == pytest.approx(train.lr * train.min_lr_ratio)
    if train.decay_steps is not None:
        between = found[train.warmup_steps : train.max_steps - train.decay_steps]
        assert between == pytest.approx([train.lr] * len(between))


@settings(deadline=None, max_examples=60)
@given(trains(schedule=st.just("wsd")))
def test_phases_twice_as_long_are_the_same_curve_at_twice_as_many_points(train: TrainConfig) -> None:
    """So that no jump is left between two steps, however long the run."""
    if train.decay_steps is None:
        return
    lengths = ("max_steps", "warmup_steps", "decay_steps")
    longer = train.model_copy(update={key: 2 * getattr(train, key) for key in lengths})
    assert rates(longer)[1::2] == pytest.approx(rates(train))


@pytest.mark.parametrize("decay_steps", [0, 1, 7, 19])
def test_warm_up_stable_decay_is_that_of_transformers(decay_steps: int) -> None:
    """Whose decay begins with a step at the full rate, and whose minimum is the rate of the step after the last."""
    keys = {"max_steps": 24, "warmup_steps": 4, "lr": 0.5, "schedule": "wsd", "decay_steps": decay_steps}
    train = TrainConfig.model_validate({**keys, "min_lr_ratio": 0.1})
    stable = {"num_stable_steps": 19 - decay_steps, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}
    theirs = of_torch(get_wsd_schedule, 0.5, 24, num_warmup_steps=4, num_decay_steps=decay_steps, **stable)
    if decay_steps:
        assert rates(train)[4:] == pytest.approx(theirs[4:])
    else:  # theirs would fall to its minimum in one step
        assert rates(train)[4:23] == pytest.approx(theirs[4:23])


def test_phases_that_do_not_fit_are_refused_by_name() -> None:
    phases = {"schedule": "wsd", "warmup_steps": 6, "decay_steps": 5}
    with pytest.raises(ValidationError, match="warmup_steps 6, decay_steps 5: more than max_steps"):
        TrainConfig.model_validate({"max_steps": 10, **phases})
