"""Tokens that the base has not: its own logits keep their bits, and it is still heard where they
come.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scale_cli.config.schema import MethodConfig
from scale_cli.model.heads import BaseOfNewTokens, ModelPair
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.vocabulary_scale import NewTokens
from scale_cli.upscale.building import NewPieces, start_model
from tests.model.test_families import tiny
from tests.plain_torch import composed_rows
from tests.widening import TINY, as_if_trained, random_ids, widen

OLD = TINY["vocab_size"]
PIECES = NewPieces(
    ["7 8 9", "7 8", "3 7", "5 5 5 5", "7"], own_pieces=[5, 7]
)  # 3 begins other text too
ALL = OLD + len(PIECES.new_tokens)


families = pytest.mark.parametrize(
    "family", ["llama, tied, biases", "llama, three queries a key", "gemma3_text"]
)


def grown(variant: str, family: str, layers: str | None = None) -> ScaleForCausalLM:
    return as_if_trained(widen(tiny(family), variant, layers, new=PIECES))


@families
@pytest.mark.parametrize(
    ("variant", "layers"), [("preserve", None), ("route", "none"), ("route", "top:1")]
)
def test_base_logits_are_bitwise_and_the_loss_is_that_of_the_logits(
    family: str, variant: str, layers: str | None
) -> None:
    model = grown(variant, family, layers)
    old_ids = random_ids(2, 11, below=OLD, seed=1)
    ids = random_ids(2, 11, below=ALL, seed=2)
    states = model.final_states(old_ids, with_base_head=True)
    assert torch.equal(model.base_logits(states), model.base(input_ids=old_ids).logits)
    new: Any = model.expansion.new_tokens
    pieces = [[int(piece) for piece in token.split()] for token in PIECES.new_tokens]
    expected_rows = composed_rows(model.base.model.embed_tokens(torch.arange(OLD)), pieces)
    torch.testing.assert_close(new.embed_tokens.weight.double(), expected_rows, rtol=0.0, atol=1e-5)

    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model.trained_logits(model.final_states(ids, with_base_head=False))
    assert logits.shape[-1] == ALL
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (of_new,) = (name for name in trained if "new_tokens" in name)
    assert of_new == "expansion.new_tokens.lm_head.weight"
    wanted = {name: p.grad for name, p in trained.items()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)


@families
def test_full_fine_tuning_of_new_tokens_is_scored_beside_the_same_base(family: str) -> None:
    base = tiny(family)
    old_ids = torch.tensor([[1, 3, 7, 5]])
    before = base(input_ids=old_ids).logits
    widened = grown("route", family)
    full = start_model(tiny(family), MethodConfig(variant="full"), 0, None)
    assert full.lm_head.weight.shape[0] == OLD

    model = start_model(base, MethodConfig(variant="full"), 0, PIECES)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model(input_ids=old_ids).logits[..., :OLD], before)

    new = torch.arange(OLD, ALL)
    plain = widened.base
    rows = NewTokens(plain, PIECES.new_tokens, PIECES.own_pieces)
    composed = rows.embed_tokens(new - OLD)
    assert torch.allclose(model.model.embed_tokens(new), composed, atol=1e-5)
    beside = ModelPair(BaseOfNewTokens(plain, rows, widened.config), plain)
    ids = random_ids(1, 9, below=ALL, seed=4)
    states = beside.base.get_decoder()(ids, use_cache=False).last_hidden_state
    logits = beside.base.get_output_embeddings()(states)
    routed = widened.head_logits(ids)(slice(None))[0]
    assert torch.allclose(logits, routed, atol=1e-5)
