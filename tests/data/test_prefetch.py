from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from scale_cli.data.batches import Batches, PackedWindows, Prefetched, batches_ahead


class Wrong(Exception):
    pass


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def failing_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise Wrong


@pytest.mark.parametrize("count", [0, 1, 7])
def test_items_come_in_order_and_an_error_in_its_place(count: int) -> None:
    with Prefetched(range(count), 2) as ahead:
        assert list(ahead) == list(range(count)) and list(ahead) == []
    with Prefetched(failing_after(count), 2) as ahead:
        assert [next(ahead) for _ in range(count)] == list(range(count))
        for _ in range(2):
            with pytest.raises(Wrong):
                next(ahead)
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_it_stops_however_the_body_ends_and_makes_no_more_ahead_than_allowed(taken: int) -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    with pytest.raises(Wrong), Prefetched(endless(), 3) as ahead:
        for _ in range(taken):
            assert len(made) <= next(ahead) + 3 + 2
        raise Wrong
    assert not threads()
    assert len(made) <= taken + 3 + 2


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


@pytest.mark.parametrize(("first", "rank", "num_processes"), [(0, 0, 1), (7, 0, 1), (0, 1, 2), (19, 1, 4), (20, 0, 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_gets_the_batches_of_each_step_for_a_gpu_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, first: int, rank: int, num_processes: int, device: str
) -> None:
    pinned_by: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned_by.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    windows = [PackedWindows(np.arange(length, dtype=np.uint16), 32) for length in (5000, 700)]
    sizes = {"seed": 3, "global_batch_size": 8, "micro_batch_size": 2}
    batches = Batches(windows, [2.0, 1.0], num_steps=20, distillation=[0.0, 1.0], **sizes)
    with batches_ahead(batches, first, rank, num_processes, torch.device(device)) as ahead:
        steps = list(ahead)
    assert [step.step for step in steps] == list(range(first, 20))
    for found in steps:
        assert found.num_targets == batches.num_targets(found.step)
        expected = batches.micro_batches(found.step, rank, num_processes)
        for micro_batch, same in zip(found.micro_batches, expected, strict=True):
            assert torch.equal(micro_batch.input_ids, same.input_ids)
            assert torch.equal(micro_batch.targets, same.targets)
            assert micro_batch.distillation == same.distillation
    num_made = sum(len(step.micro_batches) for step in steps)
    assert len(pinned_by) == 3 * num_made * (device == "cuda")
    assert all(name.startswith("prefetch") for name in pinned_by)
