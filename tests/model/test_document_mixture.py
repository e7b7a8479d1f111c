"""The chain rule: of every document there is, the routed tokens multiply to the mixture of what the
heads say of it.

Small vocabularies, so that all documents of a few tokens are there; the heads by
`tests/plain_torch.py`.
"""

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
from tests.widening import as_if_trained, tiny_llama, widen

OLD = 5
LENGTH = 3
ONE = NewPieces(["1 2", "3"], own_pieces=[1])


@dataclass
class Case:
    """A model that routes, and the tokens that it brought."""

    model: Any
    new: NewPieces
    plain: bool = True  # whether one plain model says all of it


@functools.cache
def case(name: str) -> Case:
    new, layers, prior = {
        "one": (NewPieces([], []), None, 0.7),
        "one that writes": (NewPieces([], []), "top:1", 0.5),
        "new tokens": (ONE, None, 0.4),
    }[name]
    base = tiny_llama(vocab_size=OLD, num_hidden_layers=2)
    brought = new if new.new_tokens else None
    model = widen(base, "route", layers, new=brought, prior=prior)
    return Case(as_if_trained(model, std=0.1, seed=1), new, plain=layers is None)


CASES = ["one", "one that writes", "new tokens"]


def all_documents(num_new: int) -> Tensor:
    """Every document of some tokens, after the same first one."""
    return torch.tensor(
        [(0, *rest) for rest in itertools.product(range(OLD + num_new), repeat=LENGTH)]
    )


def heads_said(these: Case, ids_BT: Tensor) -> list[Tensor]:
    """Return (B, T, V) probabilities of both heads over all tokens, by plain torch."""
    model = these.model
    base = {name: tensor.detach() for name, tensor in model.base.named_parameters()}
    named = model.expansion.named_parameters()
    added = {name: tensor.detach().double() for name, tensor in named}
    pieces = [[int(piece) for piece in token.split()] for token in these.new.new_tokens]
    rows = [*composed_rows(base["model.embed_tokens.weight"], pieces)] if pieces else []
    of_base = logits_of(model.base.config, base, None, ids_BT, more_rows=rows)
    of_trained = logits_of(model.base.config, base, added, ids_BT)
    first = [old[0] for old in pieces]
    return [
        shared_with_new_tokens(of_base, first, {*these.new.own_pieces}),
        of_trained.softmax(-1),
    ]


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
    mixture_B = prior * documents_KB[0] + (1 - prior) * documents_KB[1]
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
