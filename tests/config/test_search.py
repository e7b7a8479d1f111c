"""How much `train.lr: auto` reads."""

import math

from hypothesis import given
from hypothesis import strategies as st

from scale_cli.config.search import SearchSize, search_size
from scale_cli.config.training import TrainConfig

BIG = 10**15  # parameters of a model of which no sequence is a small model's work


def train_of(max_steps: int, global_batch_size: int) -> TrainConfig:
    sizes = {"max_steps": max_steps, "global_batch_size": global_batch_size}
    return TrainConfig.model_validate(sizes | {"micro_batch_size": 1})


@given(st.integers(1, 10_000), st.integers(1, 512), st.sampled_from([1, 2, 8]))
def test_the_search_takes_at_most_a_twentieth_of_the_work_or_a_line_search_of_four_sequences(
    max_steps: int, in_each: int, num_processes: int
) -> None:
    batch = in_each * num_processes
    size = search_size(
        train_of(max_steps, batch),
        sequence_length=256,
        num_parameters=BIG,
        num_processes=num_processes,
    )
    most = max(num_processes * math.ceil(4 / num_processes), batch)
    line, branches = (max(num_processes, min(fewest, most)) for fewest in (4, 8))
    affordable = 0.05 * max_steps * batch
    assert size.num_sequences % num_processes == 0
    assert (branches if size.num_updates else line) <= size.num_sequences <= most
    assert size.work <= affordable or size == SearchSize(line, 0)
    larger = SearchSize(size.num_sequences + num_processes, size.num_updates)
    assert size.num_sequences == most or larger.work > affordable
    # Branches come before more sequences.
    assert size.num_updates or SearchSize(branches, 4).work > affordable


def test_a_small_models_search_has_branches_however_short_its_run_is() -> None:
    run = train_of(10, 8)
    small, real = (
        search_size(run, sequence_length=256, num_parameters=number)
        for number in (5_000_000, 135_000_000)
    )
    assert small == SearchSize(8, 4)
    assert real == SearchSize(4, 0)
    # About ten seconds of two CPU cores.
    assert small.work * 256 * 6 * 5_000_000 < 2e12
