"""The chain rule: of every document there is, the routed tokens multiply to the mixture of what the
heads say of it.

Small vocabularies, so that all documents of a few tokens are there; the heads by
`tests/plain_torch.py`.
"""

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_cli.model.cache_scale import CACHE
from scale_cli.upscale.building import NewPieces
from tests.model.test_routed_scale import routed
from tests.plain_torch import composed_rows, logits_of, shared_with_new_tokens
from tests.widening import as_if_trained, joined, tiny_llama, widen

OLD = 5
LENGTH = 3
ONE = NewPieces(["1 2", "3"], own_pieces=[1])
OTHER = NewPieces(["4 4", "3 4"], own_pieces=[4])


def run(
    base: Any, new: NewPieces | None = None, *, seed: int, writes: bool = False, prior: float = 0.5
) -> Any:
    model = widen(copy.deepcopy(base), "route", "top:1" if writes else None, new=new, prior=prior)
    return as_if_trained(model, std=0.1, seed=seed)


@dataclass
class Case:
    """A model that routes, and what it was put together of."""

    model: Any
    runs: list[tuple[Any, NewPieces | None]]  # each run, and the tokens that it brought
    plain: bool = True  # whether one plain model says all of it


@functools.cache
def case(name: str) -> Case:
    base = tiny_llama(vocab_size=OLD, num_hidden_layers=2)
    if name == "one":
        model = run(base, seed=1, prior=0.7)
        return Case(model, [(model, None)])
    if name == "one that writes":
        model = run(base, seed=1, writes=True)
        return Case(model, [(model, None)], plain=False)
    one = run(base, ONE, seed=1, prior=0.4)
    if name == "new tokens":
        return Case(one, [(one, ONE)])
    if name == "two vocabularies joined":
        other = run(base, OTHER, seed=3)
        none = run(base, seed=4)
        model = joined(base, one=one, other=other, none=none)
        return Case(model, [(one, ONE), (other, OTHER), (none, None)], plain=False)
    assert name == "a writer joined"
    writer = run(base, OTHER, seed=3, writes=True)
    return Case(joined(base, one=one, writer=writer), [(one, ONE), (writer, OTHER)], plain=False)


CASES = ["one", "one that writes", "new tokens", "two vocabularies joined", "a writer joined"]


def all_documents(num_new: int) -> Tensor:
    """Every document of some tokens, after the same first one."""
    return torch.tensor(
        [(0, *rest) for rest in itertools.product(range(OLD + num_new), repeat=LENGTH)]
    )


def heads_said(these: Case, ids_BT: Tensor) -> list[Tensor]:
    """Return (B, T, V) probabilities of every head over all tokens, by plain torch."""
    model = these.model
    base = {name: tensor.detach() for name, tensor in model.base.named_parameters()}
    runs = [(None, None), *these.runs]
    vocabularies = list({id(new): new for *_, new in these.runs if new is not None}.values())
    whole = [(new, at) for new in vocabularies for at in range(len(new.new_tokens))]
    said = []
    for of_run, known in runs:
        # In a head's own order: old tokens, those that it knows, the others.
        order = sorted(range(len(whole)), key=[new is not known for new, _ in whole].__getitem__)
        unknown = [whole[place] for place in order if whole[place][0] is not known]
        pieces = [[int(piece) for piece in new.new_tokens[at].split()] for new, at in unknown]
        x_rows = [
            composed_rows(
                base["model.embed_tokens.weight"],
                [[*map(int, one.split())] for one in new.new_tokens],
            )[at]
            for new, at in unknown
        ]
        added = None
        if of_run is not None:
            named = of_run.expansion.named_parameters()
            added = {name: tensor.detach().double() for name, tensor in named}
            if pieces:
                codes = added["embed_tokens.weight"]
                added["embed_tokens.weight"] = torch.cat([codes, composed_rows(codes, pieces)])
        own_id = torch.tensor(
            [*range(OLD), *(OLD + order.index(place) for place in range(len(whole)))]
        )
        logits = logits_of(model.base.config, base, added, own_id[ids_BT], more_rows=x_rows)
        own_pieces = {piece for new, _ in unknown for piece in new.own_pieces}
        probabilities = shared_with_new_tokens(logits, [one[0] for one in pieces], own_pieces)
        said.append(probabilities[..., own_id])
    return said


def served(these: Case) -> dict[str, Any]:
    """Return the model, and its plain export with its router."""
    models = {"two streams": these.model}
    if these.plain:
        models["one row"] = routed(these.model)
    return models


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_tokens_of_a_document_multiply_to_the_mixture_of_what_the_heads_say_of_the_whole(
    name: str,
) -> None:
    these = case(name)
    num_new = these.model.config.vocab_size - OLD
    ids = all_documents(num_new)
    targets = all_documents(num_new)[:, 1:, None]
    heads = [said[:, :-1] for said in heads_said(these, ids)]
    documents_KB = torch.stack([said.gather(-1, targets).squeeze(-1).prod(-1) for said in heads])
    prior = these.model.config.router_prior
    mixture_B = prior * documents_KB[0] + (1 - prior) * documents_KB[1:].mean(0)
    assert mixture_B.sum().item() == pytest.approx(1.0)
    padded, mask = (
        torch.cat([torch.full_like(ids[:, :2], 0), rest], 1) for rest in (ids, torch.ones_like(ids))
    )
    for model in served(these).values():
        whole = model(ids, use_cache=False).logits[:, :-1]
        begun = model(ids[:, :2], use_cache=True)
        then = model(ids[:, 2:], cache=begun[CACHE], use_cache=True).logits
        ways = [whole, torch.cat([begun.logits, then], 1)[:, :-1]]
        ways += [model(padded, attention_mask=mask, use_cache=False).logits[:, 2:-1]]
        for scores in ways:
            routed_B = scores.double().softmax(-1).gather(-1, targets).squeeze(-1).prod(-1)
            torch.testing.assert_close(routed_B, mixture_B, rtol=2e-4, atol=1e-9)
