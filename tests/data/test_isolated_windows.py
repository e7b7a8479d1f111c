from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.data.batches import Batches, IsolatedWindows, PackedWindows

LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=12)


def windows_of(lengths: list[int], sequence_length: int) -> IsolatedWindows:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return IsolatedWindows(np.arange(1, offsets[-1] + 1), sequence_length, offsets)


@given(LENGTHS, st.integers(2, 9))
def test_a_position_counts_from_where_its_document_began_or_the_window(
    lengths: list[int], sequence_length: int
) -> None:
    windows = windows_of(lengths, sequence_length)
    of_token = [(document, place) for document, length in enumerate(lengths) for place in range(length)]
    for index in range(len(windows)):
        positions = windows.positions(index)
        assert positions is not None
        assert positions.shape == (sequence_length,)
        stream = range(index * sequence_length, index * sequence_length + windows.num_targets(index))
        for at, token in enumerate(stream):
            assert positions[at] == min(of_token[token][1], at)


@given(LENGTHS, st.integers(2, 9))
def test_isolation_changes_no_input_and_no_target(lengths: list[int], sequence_length: int) -> None:
    isolated = windows_of(lengths, sequence_length)
    packed = PackedWindows(isolated.ids, sequence_length)
    assert len(isolated) == len(packed)
    for index in range(len(packed)):
        for mine, theirs in zip(isolated.window(index), packed.window(index), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_batch_brings_the_positions_of_its_windows() -> None:
    windows = windows_of([3, 5, 2, 7, 4], 4)
    batches = Batches([windows], [1.0], seed=0, num_steps=2, global_batch_size=4, micro_batch_size=2)
    for micro_batch in batches.micro_batches(0):
        assert micro_batch.position_ids is not None
        for row, inputs in enumerate(micro_batch.input_ids.numpy()):
            index = (int(inputs[0]) - 1) // 4
            np.testing.assert_array_equal(micro_batch.position_ids[row].numpy(), windows.positions(index))
