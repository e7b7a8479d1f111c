"""What E' starts as: codes of random numbers, or of what the tokens are spelled with."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from scale_cli.config.schema import ExpansionConfig, MethodConfig
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.training.from_scratch import train_tokenizer
from scale_cli.upscale.codes import spelled_codes, texts_of_tokens
from scale_cli.upscale.method import start_model
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


def test_a_token_without_letters_has_a_code_of_its_own() -> None:
    codes = codes_of(["", "", "ab"])
    assert abs((codes[0] * codes[1]).mean().item()) < 0.1
    assert abs((codes[0] * codes[2]).mean().item()) < 0.1
    assert codes_of([""]).shape == (1, 4096)


def test_the_texts_of_tokens_are_one_for_every_row_and_parts_of_characters_have_none() -> None:
    tokenizer = train_tokenizer(["the cat sat", "고양이가 앉았다"] * 3, 300)
    texts = texts_of_tokens(tokenizer, 310)
    assert len(texts) == 310
    assert texts[len(tokenizer) :] == [""] * (310 - len(tokenizer))
    assert texts[tokenizer.get_vocab()["t"]] == "t"
    assert not any("\ufffd" in text for text in texts)
    assert texts.count("") > 100, "bytes of Hangul are no characters by themselves"


def test_spelled_codes_are_the_size_that_random_ones_are_and_nothing_else_starts_otherwise() -> None:
    base, tokenizer = tiny_llama(vocab_size=300), train_tokenizer(["the cat sat on the mat"] * 3, 300)
    method = MethodConfig(expansion=ExpansionConfig(codes="spelled"))
    spelled = start_model(base, method, 0, tokenizer=tokenizer)
    assert isinstance(spelled, ScaleForCausalLM)
    random = widen(tiny_llama(vocab_size=300), "route")
    rms = spelled.config.expansion_embedding_rms
    torch.testing.assert_close(
        spelled.expansion.embed_tokens.weight.square().mean(dim=1).sqrt(), torch.full((300,), rms)
    )
    expected = dict(random.expansion.named_parameters())
    for name, parameter in spelled.expansion.named_parameters():
        assert torch.equal(parameter, expected[name]) == (name != "embed_tokens.weight"), name


def test_spelled_codes_without_a_size_are_refused() -> None:
    with pytest.raises(ValidationError, match="codes: spelled ones have the size that embedding_scale gives them"):
        ExpansionConfig(codes="spelled", embedding_scale=None)
