"""Expansions with tokens of their own, joined: on text without the others' script every head is
what it is alone.

That routing keeps its bound there too is in `test_document_mixture.py`.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_cli.model.heads import token_log_probs
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.upscale.building import NewPieces
from tests.widening import (
    TINY,
    as_if_trained,
    joined,
    routed_heads,
    tiny_llama,
    widen,
)

OLD = TINY["vocab_size"]
SPACE = 3  # begins tokens of both, and any other text
ONE = NewPieces(["7 8 9", "7 8", "3 7", "5 5 5 5"], own_pieces=[5, 7])
OTHER = NewPieces(["10 11", "3 10", "12 10 11"], own_pieces=[10, 12])
NEW = {"one": ONE, "same": ONE, "other": OTHER, "none": None}
RUNS = ("one", "other", "none", "same")
PLACES = {
    "one": range(4),
    "same": range(4),
    "other": range(4, 7),
    "none": range(0),
    "base": range(0),
}
FIRST = [int(token.split()[0]) for token in ONE.new_tokens + OTHER.new_tokens]
OWN = ONE.own_pieces + OTHER.own_pieces


@functools.cache
def alone(name: str) -> ScaleForCausalLM:
    return as_if_trained(widen(tiny_llama(), "route", new=NEW.get(name)), std=0.1, seed=len(name))


@functools.cache
def together() -> JoinedForCausalLM:
    return joined(tiny_llama(), **{name: alone(name) for name in RUNS})


def said_alone(name: str, ids: Tensor) -> Tensor:
    """Return what the logits of a run alone, or of its base, give each of (T,) ids after the first."""
    heads = routed_heads(alone("none" if name == "base" else name), ids[None, :-1])
    logits_TV = heads[0 if name == "base" else 1][0].double()
    return logits_TV.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("name", PLACES)
@settings(max_examples=10)
@given(drawn=st.lists(st.integers(0, OLD + len(FIRST) - 1), min_size=2, max_size=14))
@torch.no_grad()
def test_of_a_document_without_the_others_script_a_head_says_what_it_says_alone(
    name: str, drawn: list[int]
) -> None:
    places = PLACES[name]
    knows = NEW.get(name)
    mine = range(OLD + places.start, OLD + places.stop)
    others = {*OWN} - {*(() if knows is None else knows.own_pieces)}
    old = {*range(OLD)} - others
    document = [index for index in drawn if index in mine or index in old]
    ids = torch.tensor(document if len(document) > 1 else [SPACE, 20, SPACE])
    said_KBT = token_log_probs(together(), ids[None, :-1], ids[None, 1:]).log_probs_KBT
    said = said_KBT[["base", *RUNS].index(name), 0].double()
    by_itself = said_alone(name, torch.where(ids >= OLD, ids - places.start, ids))
    torch.testing.assert_close(said, by_itself, rtol=0.0, atol=2e-4)
