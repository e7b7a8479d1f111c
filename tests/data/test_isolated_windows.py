from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.data.batches import Batches, IsolatedWindows, PackedWindows
from scale_cli.data.corpora import build_batches
from scale_cli.data.tokens import tokenised
from scale_cli.upscale.tokenizer import load_tokenizer
from tests.config.small_config import SMALLEST, load_text

LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=12)


def windows_of(lengths: list[int], sequence_length: int, *, marked_by_last: bool = False) -> IsolatedWindows:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return IsolatedWindows(np.arange(1, offsets[-1] + 1), sequence_length, offsets, marked_by_last=marked_by_last)


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
        stream = range(index * sequence_length, index * sequence_length + windows.num_targets[index])
        for at, token in enumerate(stream):
            assert positions[at] == min(of_token[token][1], at)


@given(LENGTHS, st.integers(2, 9))
def test_without_a_mark_of_its_own_a_document_begins_with_that_which_ended_the_one_before(
    lengths: list[int], sequence_length: int
) -> None:
    windows = windows_of(lengths, sequence_length, marked_by_last=True)
    # As inputs: the first document without its last token, and every other with the last of the one before it.
    one_earlier = windows_of([lengths[0] - 1, *lengths[1:], 1], sequence_length)
    for index in range(len(windows)):
        mine, theirs = windows.positions(index), one_earlier.positions(index)
        assert mine is not None
        assert theirs is not None
        num_targets = windows.num_targets[index]
        np.testing.assert_array_equal(mine[:num_targets], theirs[:num_targets])


@pytest.mark.parametrize("checkpoint", ["ckpt-stories260K", "ckpt-eltec"])  # with BOS and EOS, and with EOS alone
def test_a_first_token_is_trained_after_exactly_what_it_is_scored_after(
    tmp_path: Path, shared_data: Path, checkpoint: str
) -> None:
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "{text}."}}\n' for text in ("One", "A cat", "It")))
    config = load_text(SMALLEST, f"model.base={shared_data / checkpoint / 'hf'}", "corpus.isolate_documents=true")
    (source,) = config.corpus.sources
    tokenizer = load_tokenizer(config.model)
    corpus = tokenised(
        source.model_copy(update={"path": str(tmp_path / "*.jsonl")}),
        tokenizer,
        tmp_path / "cache",
        show_progress=False,
    )
    (windows,) = build_batches(config, [corpus], 1).sources
    inputs, targets = windows.window(0)
    positions = windows.positions(0)
    assert positions is not None
    for index in range(1, len(corpus)):
        first = int(corpus.offsets[index]) + (corpus.markers.bos is not None)
        assert targets[first - 1] == corpus.ids[first]
        assert (positions[first - 1], inputs[first - 1]) == (0, corpus.markers.context)


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
