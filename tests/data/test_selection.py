"""Which windows are trained on: by loops and counts of their own here."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.sources import SelectConfig
from scale_cli.data.batches import IGNORED, Batches, PackedWindows
from scale_cli.data.selection import chosen_windows, ngram_scores


def packed(num_tokens: int, length: int = 8, learned: Any = None) -> PackedWindows:
    return PackedWindows(np.random.default_rng(0).integers(0, 9, num_tokens).astype(np.uint16), length, learned)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0, 9), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
    st.sampled_from(["low", "middle", "high"]),
)
def test_kept_is_the_share_on_its_side_in_the_texts_order(
    scores: list[float], keep: float, side: Literal["low", "middle", "high"]
) -> None:
    windows = packed(8 * len(scores) + 1)
    chosen = chosen_windows(SelectConfig(by="ngram", keep=keep, side=side), windows, np.array(scores))
    kept, left = list(chosen.chosen), sorted(set(range(len(scores))) - set(chosen.chosen))
    assert len(kept) == max(1, round(keep * len(scores))) and len(set(kept)) == len(kept)
    of_kept, of_left = [scores[i] for i in kept], [scores[i] for i in left]
    below, above = (sum(score < min(of_kept) for score in of_left), sum(score > max(of_kept) for score in of_left))
    if side == "low":
        assert not below
    if side == "high":
        assert not above
    if side == "middle" and len(set(scores)) == len(scores):
        assert abs(above - below) <= 1
    assert kept == sorted(kept)
    assert chosen.num_left_out == sum(windows.num_targets[i] for i in left)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 5))
def test_batches_are_of_the_chosen_windows_alone_and_as_often(seed: int) -> None:
    windows = packed(8 * 12 + 1)
    scores = np.random.default_rng(1).random(12)
    chosen = chosen_windows(SelectConfig(by="ngram", keep=0.5), windows, scores)
    batches = Batches([chosen], [1.0], num_steps=9, seed=seed, global_batch_size=2, micro_batch_size=1)
    taken = [window for step in range(9) for _, window in batches.windows_of(step)]
    for epoch in (taken[:6], taken[6:12], taken[12:]):
        assert sorted(epoch) == list(range(6))
    rows = [tuple(one.input_ids[0].tolist()) for step in range(9) for one in batches.micro_batches(step)]
    assert rows == [tuple(windows.window(int(chosen.chosen[window]))[0]) for window in taken]
    (trained,) = batches.trained_tokens(8)
    assert trained.num_trained + trained.num_held_over == 3 * (8 * 12 - trained.num_left_out)
    assert trained.num_left_out == 8 * 6


@pytest.mark.parametrize("learns_all", [True, False])
def test_the_n_gram_model_is_counts_that_leave_out_what_they_score(learns_all: bool) -> None:
    learned = None if learns_all else np.random.default_rng(2).random(70) < 0.5
    windows = packed(70, learned=learned)
    grams: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    contexts: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    seen: list[list[list[tuple[int, ...]]]] = []
    for index in range(len(windows)):
        inputs, targets = windows.window(index)
        of_window = []
        for place, target in enumerate(targets):
            if target == IGNORED:
                continue
            text = [*inputs[: place + 1], target]
            of_window.append([tuple(int(i) for i in text[-order:]) for order in range(1, min(3, len(text)) + 1)])
            for order, gram in enumerate(of_window[-1]):
                grams[order][gram] += 1
                contexts[order][gram[:-1]] += 1
        seen.append(of_window)
    expected = []
    for of_window in seen:
        losses = []
        for tokens in of_window:
            probability = 1 / 9
            for order, gram in enumerate(tokens):
                above = grams[order][gram] - 1 + 5 * probability
                probability = above / (contexts[order][gram[:-1]] - 1 + 5)
            losses.append(-math.log(probability))
        expected.append(sum(losses) / len(losses) if losses else math.inf)
    assert list(ngram_scores(windows, 9)) == pytest.approx(expected)
