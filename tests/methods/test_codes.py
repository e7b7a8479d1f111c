"""What E' starts as: random numbers, or what the tokens are spelled with, or what they stand beside."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.methods.codes import cooccurrence_codes, spelled_codes, texts_of_tokens
from scale_cli.methods.widened import ExpansionConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.method import start_model
from scripts.from_scratch import train_tokenizer
from tests.widening import tiny_llama, widen


def codes_of(texts: list[str], width: int = 4096) -> Tensor:
    return spelled_codes(texts, width, torch.Generator().manual_seed(0))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text("abc가나", max_size=4), min_size=1, max_size=6))
def test_codes_are_as_near_as_the_grams_that_two_tokens_share(texts: list[str]) -> None:
    grams = [Counter([*text, *map("".join, pairwise(f"^{text}$"))] if text else []) for text in texts]

    def shared(i: int, j: int) -> float:
        both = sum(count * grams[j][gram] for gram, count in grams[i].items())
        return both / max(grams[i].total() * grams[j].total(), 1) ** 0.5

    codes = codes_of(texts)
    torch.testing.assert_close(codes.square().mean(dim=1), torch.ones(len(texts)))
    sizes = [(0.7**2 + shared(i, i)) ** 0.5 for i in range(len(texts))]  # each token's own part is 0.7
    for i in range(len(texts)):
        for j in range(i):
            nearness = (codes[i] * codes[j]).mean().item()
            assert nearness == pytest.approx(shared(i, j) / (sizes[i] * sizes[j]), abs=0.12)


def test_the_texts_of_tokens_are_one_for_every_row_and_parts_of_characters_have_none() -> None:
    tokenizer = train_tokenizer(["the cat sat", "고양이가 앉았다"] * 3, 300)
    texts = texts_of_tokens(tokenizer, 310)
    assert len(texts) == 310
    assert texts[len(tokenizer) :] == [""] * (310 - len(tokenizer))
    assert texts[tokenizer.get_vocab()["t"]] == "t"
    assert not any("\ufffd" in text for text in texts)
    assert texts.count("") > 100, "bytes of Hangul are no characters by themselves"


def test_codes_by_cooccurrence_are_the_size_that_random_ones_are_and_nothing_else_starts_otherwise() -> None:
    base, tokenizer = tiny_llama(vocab_size=300), train_tokenizer(["the cat sat on the mat"] * 3, 300)
    method = MethodConfig(expansion=ExpansionConfig(codes="cooccurrence"))
    counted = start_model(base, method, 0, tokenizer=tokenizer, ids_N=np.arange(40, dtype=np.uint16))
    assert isinstance(counted, ScaleForCausalLM)
    random = widen(tiny_llama(vocab_size=300), "route")
    rms = counted.config.expansion_embedding_rms
    torch.testing.assert_close(
        counted.expansion.embed_tokens.weight.square().mean(dim=1).sqrt(), torch.full((300,), rms)
    )
    expected = dict(random.expansion.named_parameters())
    for name, parameter in counted.expansion.named_parameters():
        assert torch.equal(parameter, expected[name]) == (name != "embed_tokens.weight"), name


def exact_directions(ids: list[int], size: int) -> NDArray[np.float64]:
    """U sqrt(S) of what a token tells of those that follow: counted one by one, decomposed in full."""
    counts = Counter(ids)
    smoothed = {token: count**0.75 for token, count in counts.items()}
    information = np.zeros((size, 2 * size))
    for weight, distance, part in ((1.0, 1, information[:, :size]), (0.5, 2, information[:, size:])):
        for (a, b), count in Counter(zip(ids, ids[distance:], strict=False)).items():
            share = smoothed[b] / sum(smoothed.values())
            part[a, b] = weight * max(0.0, np.log(count / counts[a] / share))
    left, values, _ = np.linalg.svd(information, full_matrices=False)
    directions: NDArray[np.float64] = left * np.sqrt(values)
    return directions


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 6), max_size=60))
def test_codes_by_cooccurrence_are_as_near_as_what_follows_two_tokens_and_their_letters(ids: list[int]) -> None:
    state = torch.get_rng_state()
    codes = cooccurrence_codes([""] * 7, torch.tensor(ids).long(), 512, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(codes.square().mean(dim=1), torch.ones(7))
    directions = exact_directions(ids, 7)
    sizes = np.linalg.norm(directions, axis=1)
    told = [size > 1e-3 for size in sizes]  # others start with their own numbers alone
    for i, j in combinations(range(7), 2):
        alike = directions[i] @ directions[j] / (sizes[i] * sizes[j]) if told[i] and told[j] else 0.0
        own = [(told[k] + 0.7**2) ** 0.5 for k in (i, j)]  # without letters, what is the token's own
        assert (codes[i] * codes[j]).mean().item() == pytest.approx(alike / (own[0] * own[1]), abs=0.2)


def test_a_token_that_the_text_does_not_have_starts_as_it_is_spelled() -> None:
    texts = ["ab", "bc", "cd", ""]
    codes = cooccurrence_codes(texts, torch.tensor([0, 1] * 9), 8, torch.Generator().manual_seed(0))
    spelled = spelled_codes(texts, 8, torch.Generator().manual_seed(0))
    torch.testing.assert_close(codes[2:], spelled[2:])
    assert not torch.isclose(codes[:2], spelled[:2], atol=0.1).all(dim=1).any()
