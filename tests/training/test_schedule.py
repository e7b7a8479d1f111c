from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from scale_cli.config.schema import TrainConfig
from scale_cli.training.schedule import learning_rate

DECAYING = ("cosine", "linear")


@st.composite
def trains(draw: st.DrawFn, /, **fixed: Any) -> TrainConfig:
    max_steps = draw(st.integers(1, 60))
    fields = {
        "max_steps": max_steps,
        "warmup_steps": draw(st.integers(0, max_steps)),
        "lr": draw(st.floats(1e-8, 1.0)),
        "min_lr_ratio": draw(st.floats(0.0, 1.0)),
        "schedule": draw(st.sampled_from(["cosine", "linear", "constant"])),
    }
    return TrainConfig.model_validate(fields | {name: draw(value) for name, value in fixed.items()})


def rates(train: TrainConfig) -> list[float]:
    return [learning_rate(step, train) for step in range(train.max_steps)]


def of_torch(schedule: type[LRScheduler], lr: float, num_steps: int, **options: Any) -> list[float]:
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
def test_the_rate_is_positive_but_at_its_end_and_never_above_lr(train: TrainConfig) -> None:
    found = rates(train)
    assert all(0.0 < rate <= train.lr * (1 + 1e-12) for rate in found[:-1])
    assert 0.0 <= found[-1] <= train.lr * (1 + 1e-12)
    assert all(rate >= train.lr * train.min_lr_ratio * (1 - 1e-12) for rate in found[train.warmup_steps :])


@settings(deadline=None, max_examples=100)
@given(trains())
@example(ONE_STEP)
@example(ALL_WARMUP)
def test_warm_up_climbs_in_equal_steps_from_its_first_to_lr(train: TrainConfig) -> None:
    warmup = rates(train)[: train.warmup_steps]
    assert warmup == pytest.approx([train.lr * (i + 1) / train.warmup_steps for i in range(train.warmup_steps)])
    assert all(after > before for before, after in pairwise(warmup))
    assert warmup[-1:] in ([], [pytest.approx(train.lr)])


@settings(deadline=None, max_examples=100)
@given(trains())
@example(ONE_STEP)
@example(ALL_WARMUP)
def test_the_rate_never_rises_after_warm_up_and_starts_at_lr(train: TrainConfig) -> None:
    after = rates(train)[train.warmup_steps :]
    assert after[:1] in ([], [pytest.approx(train.lr)])
    assert all(now <= before * (1 + 1e-12) for before, now in pairwise(after))


@settings(deadline=None, max_examples=100)
@given(trains(schedule=st.sampled_from(DECAYING)))
@example(TrainConfig(max_steps=2, lr=0.5))
def test_a_decay_of_two_steps_or_more_ends_at_the_minimum(train: TrainConfig) -> None:
    last = rates(train)[-1]
    if train.max_steps - train.warmup_steps >= 2:
        assert last == pytest.approx(train.lr * train.min_lr_ratio, abs=train.lr * 1e-12)
    else:
        assert last == pytest.approx(train.lr)


@settings(deadline=None, max_examples=100)
@given(trains(schedule=st.just("constant")))
def test_a_constant_rate_is_lr_after_warm_up(train: TrainConfig) -> None:
    assert set(rates(train)[train.warmup_steps :]) <= {train.lr}


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
