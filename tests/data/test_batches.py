"""Windows, batches, isolated documents, and batches made ahead: pure functions of the config and
the step.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from scale_cli.data.batches import (
    IGNORED,
    Batches,
    MicroBatch,
    PackedWindows,
    Prefetched,
    batches_ahead,
)
from scale_cli.data.corpora import build_batches, open_sources
from scale_cli.upscale.base_tokenizer import load_tokenizer
from tests.data.corpus_files import write_jsonl
from tests.small_runs import SMALLEST, load_text

# A stream whose ids are their own positions says of every id in a batch where it came from.
FAR = 2**15  # apart, so that the streams of several sources share no id


def stream(length: int, source: int = 0) -> npt.NDArray[np.uint32]:
    return np.arange(source * FAR, source * FAR + length, dtype=np.uint32)


def batches(
    lengths: list[int], sequence_length: int, weights: list[float] | None = None, **options: Any
) -> Batches:
    defaults = {
        "num_steps": 4,
        "seed": 0,
        "global_batch_size": 4,
        "micro_batch_size": 2,
    }
    windows = [
        PackedWindows(stream(length, source), sequence_length)
        for source, length in enumerate(lengths)
    ]
    return Batches(windows, weights or [1.0] * len(lengths), **(defaults | options))


def rows(micro_batches: Iterable[MicroBatch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the inputs and the targets of every sequence."""
    sequences = (
        zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True)
        for batch in micro_batches
    )
    return [(tuple(inputs), tuple(targets)) for inputs, targets in chain.from_iterable(sequences)]


LENGTHS = st.integers(2, 200)
SEQUENCE_LENGTHS = st.integers(1, 33)


# Windows


@settings(max_examples=100)
@given(LENGTHS, SEQUENCE_LENGTHS, st.none() | st.integers(0, 2**32 - 1))
def test_every_token_to_learn_is_a_target_once_an_epoch_after_the_one_before_it(
    length: int, sequence_length: int, seed: int | None
) -> None:
    learned = None if seed is None else np.random.default_rng(seed).random(length) < 0.5
    windows = PackedWindows(stream(length), sequence_length, learned)
    seen = []
    read = []
    for index in range(len(windows)):
        inputs, targets = windows.window(index)
        assert inputs.shape == targets.shape == (sequence_length,)
        real = targets != IGNORED
        assert real.sum() == windows.num_targets[index]
        assert (inputs[real] + 1 == targets[real]).all()
        seen += targets[real].tolist()
        read += inputs.tolist()
    assert seen == [place for place in range(1, length) if learned is None or learned[place]]
    assert read == [*range(length - 1), *[0] * (len(read) - length + 1)]


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(2, 33),
    st.none() | st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_every_window_begins_with_the_boundary_and_reads_what_a_window_without_it_reads(
    lengths: list[int], sequence_length: int, seed: int | None, stands_before: bool
) -> None:
    """The boundary is BOS, before every document, or the token that ends each."""
    boundary = 7
    ids = stream(sum(lengths) + 1) + 10
    offsets = np.cumsum([0, *lengths])
    ids[offsets if stands_before else offsets[1:]] = boundary
    learned = None if seed is None else np.random.default_rng(seed).random(len(ids)) < 0.5
    windows = PackedWindows(ids, sequence_length, learned, boundary=boundary)
    seen = []
    for index in range(len(windows)):
        inputs, targets = windows.window(index)
        assert inputs.shape == targets.shape == (sequence_length,)
        assert inputs[0] == boundary
        real = np.flatnonzero(targets != IGNORED)
        assert len(real) == windows.num_targets[index]
        for at in real:  # what the window has read up to it is the stream before it
            read = inputs[: at + 1].tolist()
            place = index * (sequence_length - 1) + at + (ids[index * (sequence_length - 1)] == 7)
            before = ids[max(place - len(read) + 1, 0) : place].tolist()
            assert read in ([boundary, *before], before[-len(read) :])
            assert ids[place] == targets[at]
            seen.append(place)
    assert seen == [at for at in range(1, len(ids)) if learned is None or learned[at]]


# Batches


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    micro = draw(st.integers(1, 3))
    parts = draw(st.integers(1, 6))
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=3))
    of_each: dict[str, Any] = {"min_size": len(lengths), "max_size": len(lengths)}
    return {
        "lengths": lengths,
        "weights": draw(st.lists(st.floats(0.01, 10), **of_each)),
        "distillation": draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), **of_each)),
        "sequence_length": draw(SEQUENCE_LENGTHS),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "num_steps": draw(st.integers(1, 5)),
        "global_batch_size": micro * parts,
        "micro_batch_size": micro,
    }


@settings(max_examples=60)
@given(plans(), st.data())
def test_the_ranks_of_any_world_hold_the_global_batch_of_one_process(
    plan: dict[str, Any], data: st.DataObject
) -> None:
    of = batches(**plan)
    parts = plan["global_batch_size"] // plan["micro_batch_size"]
    world = data.draw(st.sampled_from([size for size in range(1, parts + 1) if parts % size == 0]))
    for step in range(plan["num_steps"]):
        ranks = [list(of.of_step(step, rank, world).micro_batches) for rank in range(world)]
        assert {len(rank) for rank in ranks} == {parts // world}
        for batch in (batch for rank in ranks for batch in rank):
            assert (
                batch.input_ids.shape
                == batch.targets.shape
                == (plan["micro_batch_size"], plan["sequence_length"])
            )
            distilled = tuple(
                plan["distillation"][target // FAR] for target in batch.targets.amax(dim=1).tolist()
            )
            assert batch.distillation == (distilled if any(distilled) else None)
        assert (
            sum(of.of_step(step).num_targets)
            == sum(int((b.targets != IGNORED).sum()) for rank in ranks for b in rank)
            > 0
        )
        interleaved = [batch for turn in zip(*ranks, strict=True) for batch in turn]
        assert rows(interleaved) == rows(of.of_step(step).micro_batches)


@settings(max_examples=60)
@given(plans(), st.data())
def test_a_batch_depends_on_seed_and_step_alone(plan: dict[str, Any], data: st.DataObject) -> None:
    """Not on what was asked for before, nor on how it is cut up, nor on how long the run will be."""
    steps = data.draw(st.permutations(range(plan["num_steps"])))
    one = batches(**plan)
    longer = plan | {"num_steps": plan["num_steps"] + data.draw(st.integers(0, 50))}
    other = batches(**(longer | {"micro_batch_size": plan["global_batch_size"]}))
    in_order = [rows(one.of_step(step).micro_batches) for step in range(plan["num_steps"])]
    shuffled = {step: rows(other.of_step(step).micro_batches) for step in steps}
    assert in_order == [shuffled[step] for step in range(plan["num_steps"])]


@settings(max_examples=60)
@given(plans())
def test_every_epoch_of_every_source_visits_each_of_its_windows_once(plan: dict[str, Any]) -> None:
    """The k-th sample of a source is the k-th window of its epochs."""
    of = batches(**plan | {"num_steps": 20})
    located = [located for step in range(20) for located in of.windows_of(step)]
    drawn = [row for step in range(20) for row in rows(of.of_step(step).micro_batches)]
    assert [inputs[0] % FAR for inputs, _ in drawn] == [
        window * plan["sequence_length"] for _, window in located
    ]
    assert len(located) == 20 * plan["global_batch_size"]
    for source, windows in enumerate(of.sources):
        mine = [window for drawn_from, window in located if drawn_from == source]
        for begin in range(0, len(mine), len(windows)):
            epoch = mine[begin : begin + len(windows)]
            assert len(set(epoch)) == len(epoch)


@settings(max_examples=60)
@given(plans(), st.data())
def test_every_target_of_the_epochs_begun_is_trained_or_held_over(
    plan: dict[str, Any], data: st.DataObject
) -> None:
    of = batches(**plan)
    num_steps = data.draw(st.integers(0, plan["num_steps"]))
    seen: Counter[int] = Counter()
    for step in range(num_steps):
        for _, targets in rows(of.of_step(step).micro_batches):
            seen.update(target for target in targets if target != IGNORED)
    for source, (length, trained) in enumerate(
        zip(plan["lengths"], of.trained_tokens(num_steps), strict=True)
    ):
        times = [seen[source * FAR + position] for position in range(1, length)]
        assert trained.num_trained == sum(times)
        assert trained.num_epochs == max(times)
        assert trained.num_held_over == sum(trained.num_epochs - count for count in times)
        assert trained.num_trained + trained.num_held_over == trained.num_epochs * (length - 1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2, unique=True))
def test_different_seeds_and_epochs_have_orders_of_their_own(seeds: list[int]) -> None:
    one, other = (batches([65, 65], 1, seed=seed, num_steps=8) for seed in seeds)
    pairs = [(one.windows_of(step), other.windows_of(step)) for step in range(8)]
    for part in (0, 1):  # the source, and its window
        assert any(a[part] != b[part] for of, to in pairs for a, b in zip(of, to, strict=True))
    of = batches([65], 1, seed=seeds[0], num_steps=8, global_batch_size=16, micro_batch_size=16)
    drawn = [window for step in range(8) for _, window in of.windows_of(step)]
    assert drawn[:64] != drawn[64:] and drawn[:64] != sorted(drawn[:64])


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_sources_of_one_length_have_orders_of_their_own(seed: int) -> None:
    of = batches([65, 65], 1, seed=seed, num_steps=64)
    drawn = [located for step in range(64) for located in of.windows_of(step)]
    one, other = ([window for of_source, window in drawn if of_source == n] for n in (0, 1))
    assert one[:64] != other[:64]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any))
def test_sources_are_drawn_by_their_weights(seed: int, weights: list[int]) -> None:
    """Shares lie where those of independent draws would, but for one seed in 100 million."""
    options = {"global_batch_size": 200, "micro_batch_size": 1, "seed": seed}
    of = batches([50, 60, 70], 5, [float(weight) for weight in weights], **options)
    drawn = Counter(source for step in range(4) for source, _ in of.windows_of(step))
    for source, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert (
            binomtest(drawn[source], 800, expected).pvalue > 1e-8 if expected else not drawn[source]
        )


# Isolated documents


@given(st.lists(st.integers(1, 12), min_size=2, max_size=12), st.integers(2, 9), st.integers(0, 1))
def test_a_position_counts_from_where_its_document_began_or_the_window_and_no_token_changes(
    lengths: list[int], sequence_length: int, lead: int
) -> None:
    """Without a mark of its own (a lead of 1) a document begins with that which ended the one before."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, offsets[-1] + 1)
    windows = PackedWindows(ids, sequence_length, offsets=offsets, lead=lead)
    packed = PackedWindows(ids, sequence_length)
    as_inputs = [lengths[0] - lead, *lengths[1:], lead]
    of_token = [place for length in as_inputs for place in range(length)]
    for index in range(len(windows)):
        positions = windows.positions(index)
        assert positions is not None and positions.shape == (sequence_length,)
        first = index * sequence_length
        for at in range(windows.num_targets[index]):
            assert positions[at] == min(of_token[first + at], at)
        assert np.array_equal(windows.window(index), packed.window(index))


@pytest.mark.parametrize(
    "checkpoint", ["ckpt-stories260K", "ckpt-eltec"]
)  # with BOS and EOS, and with EOS alone
def test_a_first_token_is_trained_after_exactly_what_it_is_scored_after(
    tmp_path: Path, shared_data: Path, checkpoint: str
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", ["One.", "A cat.", "It."])
    source = f"corpus.sources.0.path={tmp_path}/*.jsonl"
    folders = f"model.base={shared_data / checkpoint / 'hf'}", f"corpus.cache_dir={tmp_path}/cache"
    config = load_text(SMALLEST, source, *folders, "corpus.isolate_documents=true")
    (corpus,) = open_sources(config, config.corpus.sources, load_tokenizer(config.model))
    of = build_batches(config, [corpus], 1)
    inputs, targets = of.sources[0].window(0)
    positions = of.sources[0].positions(0)
    assert positions is not None
    assert inputs[0] == corpus.markers.context
    put_before = int(corpus.markers.bos is None)  # before the first window, which no EOS precedes
    for index in range(1, len(corpus)):
        first = int(corpus.offsets[index]) + (corpus.markers.bos is not None) + put_before
        assert targets[first - 1] == corpus.ids[first - put_before]
        assert (positions[first - 1], inputs[first - 1]) == (0, corpus.markers.context)
    for micro_batch in of.of_step(0).micro_batches:
        assert micro_batch.position_ids is not None
        assert micro_batch.position_ids[0].tolist() == positions.tolist()


# Made ahead


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_gets_the_batches_of_each_step_for_a_gpu_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    pinned_by: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned_by.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    of = batches([5000, 700], 32, num_steps=20, distillation=[0.0, 1.0])
    with batches_ahead(of, 7, rank=1, num_processes=2, device=torch.device(device)) as ahead:
        found = list(ahead)
    expected = [of.of_step(step, rank=1, num_processes=2) for step in range(7, 20)]
    assert [step.step for step in found] == list(range(7, 20))
    for one, other in zip(found, expected, strict=True):
        assert one.num_targets == other.num_targets
        assert rows(one.micro_batches) == rows(other.micro_batches)
        assert [batch.distillation for batch in one.micro_batches] == [
            batch.distillation for batch in other.micro_batches
        ]
    assert len(pinned_by) == 3 * 13 * (device == "cuda")
    assert all(name.startswith("prefetch") for name in pinned_by)
