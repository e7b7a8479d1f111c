"""Expansions with tokens of their own, joined: every head is what it is alone, and routing keeps its bound."""

from __future__ import annotations

import functools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scale_cli.config.schema import MethodConfig
from scale_cli.model.heads import token_log_probs
from scale_cli.model.joined_scale import JoinedForCausalLM
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import piece_shares
from scale_cli.upscale.method import NewPieces, start_model
from tests.widening import TINY, joined, tiny_llama

OLD = TINY["vocab_size"]
SPACE = 3  # begins tokens of both, and any other text
ONE = NewPieces(["7 8 9", "7 8", "3 7", "5 5 5 5"], own_pieces=[5, 7])
OTHER = NewPieces(["10 11", "3 10", "12 10 11"], own_pieces=[10, 12])
NEW = {"one": ONE, "same": ONE, "other": OTHER, "none": None}
PLACES = {"one": range(4), "same": range(4), "upon": range(4), "other": range(4, 7), "none": range(0), "base": range(0)}
FIRST, OWN = ONE.first + OTHER.first, ONE.own_pieces + OTHER.own_pieces


@functools.cache
def alone(name: str) -> ScaleForCausalLM:
    base = alone("one") if name == "upon" else tiny_llama()
    model = start_model(base, MethodConfig(variant="route"), 0, NEW.get(name))
    assert isinstance(model, ScaleForCausalLM)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.expansion.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.cache
def together() -> JoinedForCausalLM:
    parents = {"one": 0, "other": 0, "none": 0, "same": 0, "upon": 1}
    return joined(tiny_llama(), **{name: (parent, alone(name)) for name, parent in parents.items()})


def said_alone(name: str, ids: Tensor) -> Tensor:
    """Return (T, known tokens) float64 probabilities: of a run alone, or of its base."""
    model = alone("none" if name == "base" else name)
    states = model.final_states(ids[None], preserved=True)
    logits = model.base_logits(states) if name == "base" else model.adaptation_logits(states)
    return logits[0].double().softmax(-1)


def of_all_tokens(name: str, known_TV: Tensor) -> Tensor:
    """Return (T, all tokens): what follows for the others, token by token."""
    places = PLACES[name]
    unknown = [at for at in range(len(FIRST)) if at not in places]
    all_TV = known_TV.new_zeros(len(known_TV), OLD + len(FIRST))
    all_TV[:, :OLD] = known_TV[:, :OLD]
    for column, at in enumerate(places):
        all_TV[:, OLD + at] = known_TV[:, OLD + column]
    for piece in {FIRST[at] for at in unknown}:
        sharing = [at for at in unknown if FIRST[at] == piece]
        own = piece in OWN
        for at in sharing:
            all_TV[:, OLD + at] = known_TV[:, piece] * (1 / (1 + len(sharing)) if own else 2.0**-20 / len(sharing))
        all_TV[:, piece] = known_TV[:, piece] / (1 + len(sharing) if own else 1)
    return all_TV / all_TV.sum(-1, keepdim=True)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["one", "other", "none", "same", "upon", "base"]),
    st.lists(st.integers(0, OLD + len(FIRST) - 1), min_size=2, max_size=14),
)
@torch.no_grad()
def test_a_document_without_the_others_script_is_routed_as_its_runs_say_and_costs_no_more_than_the_bound(
    name: str, drawn: list[int]
) -> None:
    """Against a reference that reads one document, in one run at a time, and routes it token by token."""
    model, others = together(), [piece for piece in OWN if name in ("base", "none") or piece not in own_of(name)]
    mine = range(OLD + PLACES[name].start, OLD + PLACES[name].stop)
    document = [index for index in drawn if (index < OLD and index not in others) or index in mine]
    if len(document) < 2:
        document = [SPACE, 20, SPACE]
    ids = torch.tensor(document)
    heads = ["base", *(member["name"] for member in model.config.members)]
    said = token_log_probs(model, ids[None, :-1], ids[None, 1:]).log_probs_KBT[:, 0].double()
    moved = torch.where(ids >= OLD, ids - PLACES[name].start, ids)
    same_tokens = [head for head in heads if PLACES[head] == PLACES[name]] if max(document) >= OLD else heads
    for head in same_tokens:
        reference = of_all_tokens(head, said_alone(head, moved[:-1])).log().gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(said[heads.index(head)], reference, atol=2e-4), head
        if head == name:  # itself, as it is without the others
            own = said_alone(head, moved[:-1]).log().gather(-1, moved[1:, None])[:, 0]
            assert torch.allclose(said[heads.index(head)], own, atol=2e-4)

    weights = torch.full((len(heads),), 1 / len(heads), dtype=torch.float64)
    routed = 0.0
    for said_K in said.T:
        mixed = weights @ said_K.exp()
        routed += math.log(mixed)
        weights = weights * said_K.exp() / mixed
    logits = model(input_ids=ids[None, :-1]).logits[0].double().log_softmax(-1)
    assert math.isclose(logits.gather(-1, ids[1:, None]).sum(), routed, abs_tol=2e-3)
    assert torch.allclose(logits.exp().sum(-1), torch.ones(len(ids) - 1, dtype=torch.float64))
    best = said_alone(name, moved[:-1]).log().gather(-1, moved[1:, None]).sum()
    assert routed >= best - math.log(len(heads)) - 2e-3


def own_of(name: str) -> list[int]:
    return OTHER.own_pieces if name == "other" else ONE.own_pieces


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, OLD + len(FIRST) - 1), min_size=2, max_size=14))
@torch.no_grad()
def test_any_document_is_routed_within_the_bound_and_generation_goes_on_from_the_cache(document: list[int]) -> None:
    model, ids = together(), torch.tensor([document])
    said = token_log_probs(model, ids[:, :-1], ids[:, 1:]).log_probs_KBT
    assert said.isfinite().all()
    whole = model(input_ids=ids[:, :-1]).logits
    routed = whole.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()
    assert routed >= said.sum(-1).max() - math.log(len(said)) - 1e-3
    part = model(input_ids=ids[:, :1], use_cache=True)
    if ids.shape[1] > 2:
        rest = model(input_ids=ids[:, 1:-1], past_key_values=part.past_key_values, use_cache=True).logits
        assert torch.allclose(whole[:, -1], rest[:, -1], atol=1e-3)


def test_a_head_says_the_same_of_logits_by_ids_whatever_stands_at_the_tokens_that_it_does_not_know() -> None:
    """As a plain export holds them, where the columns of a head give something for every token."""
    config = together().config
    shares = piece_shares(FIRST, OWN, config.known_by_heads(), config.vocab_size)
    for head, of_head in enumerate(shares):
        if of_head is not None:
            ids = torch.tensor(config.token_ids(head))
            by_ids = torch.randn(3, config.vocab_size, generator=torch.Generator().manual_seed(head))
            num_known = len(ids) - len(config.unknown_tokens(head))
            assert torch.equal(of_head(by_ids), of_head(by_ids[:, ids[:num_known]]))
