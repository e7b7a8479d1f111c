from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from transformers import get_wsd_schedule

from scale_cli.config.schedule import SCHEDULES, learning_rate
from scale_cli.config.training import TrainConfig


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
        fields["decay_steps"] = draw(
            st.none() | st.integers(0, fields["max_steps"] - fields["warmup_steps"])
        )
    return TrainConfig.model_validate(fields)


def rates(train: TrainConfig) -> list[float]:
    return [learning_rate(step, train) for step in range(train.max_steps)]


def of_torch(
    schedule: Callable[..., LRScheduler], lr: float, num_steps: int, **options: Any
) -> list[float]:
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
A_SHORT_TRIAL = TrainConfig(max_steps=4, warmup_steps=40, lr=0.5, schedule="wsd")


@settings(max_examples=100)
@given(trains())
@example(ONE_STEP)
@example(ALL_WARMUP)
@example(A_SHORT_TRIAL)
def test_the_rate_climbs_in_equal_steps_to_lr_never_rises_after_and_never_falls_below_its_minimum(
    train: TrainConfig,
) -> None:
    found = rates(train)
    warmup, after = found[: train.warmup_steps], found[train.warmup_steps :]
    assert warmup == pytest.approx(
        [train.peak_lr * (i + 1) / train.warmup_steps for i in range(len(warmup))]
    )
    assert all(later > earlier for earlier, later in pairwise(warmup))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    if train.schedule == "constant":
        assert after == [train.peak_lr] * len(after)
    assert all(
        train.peak_lr * train.min_lr_ratio * (1 - 1e-12) <= rate <= train.peak_lr * (1 + 1e-12)
        for rate in after
    )


@settings(max_examples=60)
@given(trains(schedule=st.just("cosine")))
def test_the_cosine_is_that_of_torch(train: TrainConfig) -> None:
    num_decay = train.max_steps - train.warmup_steps
    if num_decay < 2:
        return
    shape = {"T_max": num_decay - 1, "eta_min": train.peak_lr * train.min_lr_ratio}
    decay = of_torch(CosineAnnealingLR, train.peak_lr, num_decay, **shape)
    # Torch multiplies its way from step to step, and carries the rounding along.
    found = rates(train)[train.warmup_steps :]
    assert found == pytest.approx(decay, rel=1e-6, abs=train.peak_lr * 1e-9)


@settings(max_examples=100)
@given(trains(schedule=st.just("wsd")))
def test_warm_up_stable_decay_is_that_of_transformers(train: TrainConfig) -> None:
    """Whose decay begins with a step at the full rate, and whose minimum is the rate of the step after the last."""
    found, after_warmup = rates(train), train.max_steps - train.warmup_steps
    decay_steps = (
        min(round(train.max_steps / 5), after_warmup)
        if train.decay_steps is None
        else train.decay_steps
    )
    stable_steps = after_warmup - decay_steps
    assert found[train.warmup_steps :][:stable_steps] == [train.peak_lr] * stable_steps
    if decay_steps:
        assert found[-1] == pytest.approx(train.peak_lr * train.min_lr_ratio)
    if decay_steps and stable_steps:
        steps = {"num_warmup_steps": train.warmup_steps, "num_decay_steps": decay_steps}
        shape = {
            "num_stable_steps": stable_steps - 1,
            "decay_type": "1-sqrt",
            "min_lr_ratio": train.min_lr_ratio,
        }
        theirs = of_torch(get_wsd_schedule, train.peak_lr, train.max_steps, **steps, **shape)
        assert found[train.warmup_steps :] == pytest.approx(
            theirs[train.warmup_steps :], abs=train.peak_lr * 1e-9
        )


def test_the_default_decay_begins_at_the_full_rate_however_long_the_warm_up_is() -> None:
    long_warmup = {"max_steps": 20, "warmup_steps": 18, "lr": 0.5, "schedule": "wsd"}
    by_default = TrainConfig.model_validate(long_warmup)
    whole_rest = TrainConfig.model_validate({**long_warmup, "decay_steps": 2})
    assert rates(by_default) == rates(whole_rest)
