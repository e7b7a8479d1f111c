from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.data.batches import Batches, PackedWindows, StepBatches
from scale_cli.data.prefetch import Prefetched, batches_ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(), max_size=20), st.integers(1, 5))
def test_the_items_are_those_of_the_iterable_in_order(items: list[int], num_ahead: int) -> None:
    with Prefetched(items, num_ahead) as ahead:
        assert list(ahead) == items
        assert list(ahead) == []
    assert not threads()


class Wrong(Exception):
    pass


def failing_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise Wrong


@pytest.mark.parametrize("count", [0, 1, 7])
def test_an_error_is_raised_in_its_place(count: int) -> None:
    with Prefetched(failing_after(count), 2) as ahead:
        assert [next(ahead) for _ in range(count)] == list(range(count))
        for _ in range(2):
            with pytest.raises(Wrong):
                next(ahead)
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_it_stops_however_the_body_ends(taken: int) -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    with pytest.raises(Wrong), Prefetched(endless(), 3) as ahead:
        for _ in range(taken):
            next(ahead)
        raise Wrong
    assert not threads()
    assert len(made) <= taken + 3 + 2


def test_no_more_is_made_ahead_than_allowed() -> None:
    made = 0

    def counted() -> Iterator[int]:
        nonlocal made
        for item in range(100):
            made += 1
            yield item

    with Prefetched(counted(), 4) as ahead:
        for taken, _ in enumerate(ahead, start=1):
            assert made <= taken + 4 + 1


def some_batches(num_steps: int) -> Batches:
    windows = [PackedWindows(np.arange(5000, dtype=np.uint16), 32), PackedWindows(np.arange(700, dtype=np.uint16), 32)]
    return Batches(
        windows,
        [2.0, 1.0],
        seed=3,
        num_steps=num_steps,
        global_batch_size=8,
        micro_batch_size=2,
        distillation=[0.0, 1.0],
    )


@pytest.mark.parametrize(("first", "rank", "num_processes"), [(0, 0, 1), (7, 0, 1), (0, 1, 2), (19, 1, 4), (20, 0, 1)])
def test_the_batches_of_the_steps_are_exactly_those_of_each_step(first: int, rank: int, num_processes: int) -> None:
    batches = some_batches(20)
    with Prefetched(batches.from_step(first, rank, num_processes), 3) as ahead:
        steps: list[StepBatches] = list(ahead)
    assert [step.step for step in steps] == list(range(first, 20))
    for found in steps:
        expected = list(batches.micro_batches(found.step, rank, num_processes))
        assert found.num_targets == batches.num_targets(found.step)
        assert len(found.micro_batches) == len(expected)
        for micro_batch, same in zip(found.micro_batches, expected, strict=True):
            assert torch.equal(micro_batch.input_ids, same.input_ids)
            assert torch.equal(micro_batch.targets, same.targets)
            assert micro_batch.distillation == same.distillation


def test_asked_step_by_step_it_answers_as_the_batches_do() -> None:
    batches = some_batches(20)
    with batches_ahead(batches, 5, 1, 2, torch.device("cpu")) as ahead:
        for found, expected in zip(ahead, batches.from_step(5, 1, 2), strict=True):
            assert (found.step, found.num_targets) == (expected.step, expected.num_targets)
            for micro_batch, same in zip(found.micro_batches, expected.micro_batches, strict=True):
                assert torch.equal(micro_batch.input_ids, same.input_ids)
    assert not threads()


def test_for_a_gpu_the_thread_that_makes_them_pins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned_by: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned_by.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batches = some_batches(3)
    with batches_ahead(batches, 0, 0, 1, torch.device("cuda")) as ahead:
        for step, found in enumerate(ahead):
            for micro_batch, same in zip(found.micro_batches, batches.micro_batches(step), strict=True):
                assert torch.equal(micro_batch.input_ids, same.input_ids)
                assert micro_batch.distillation == same.distillation
    assert len(pinned_by) == 3 * 4 * 3
    assert all(name.startswith("prefetch") for name in pinned_by)


def test_what_is_asked_for_next_is_made_while_the_body_works() -> None:
    made = [threading.Event() for _ in range(8)]

    def told() -> Iterator[int]:
        for item, event in enumerate(made):
            event.set()
            yield item

    with Prefetched(told(), 2) as ahead:
        for item in ahead:
            # Nothing is asked for meanwhile.
            assert all(event.wait(timeout=60) for event in made[item : item + 3])
