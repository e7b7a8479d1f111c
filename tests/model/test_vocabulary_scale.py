"""Tokens that the base has not: its own logits keep their bits, and it is still heard where they come."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from scale_cli.config.schema import MethodConfig
from scale_cli.export.dense import plain_model
from scale_cli.methods.widened import CollaborationConfig
from scale_cli.model.heads import BaseAndTrained
from scale_cli.model.modeling_scale import ScaleForCausalLM
from scale_cli.model.routing import PieceShares
from scale_cli.model.vocabulary_scale import BaseOfNewTokens
from scale_cli.upscale.method import NewPieces, start_model
from tests.widening import TINY

OLD = TINY["vocab_size"]
PIECES = NewPieces(["7 8 9", "7 8", "3 7", "5 5 5 5", "7"], own_pieces=[5, 7])  # 3 begins other text too
ALL = OLD + len(PIECES.new_tokens)


GEMMA = {"head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
families = pytest.mark.parametrize("family", [("llama", {}), ("gemma3_text", GEMMA)], ids=["llama", "gemma"])


def random_base(model_type: str = "llama", more: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(TINY | (more or {}) | options))
    return AutoModelForCausalLM.from_config(config).eval()


def grown(variant: str, *family: Any, **keys: Any) -> ScaleForCausalLM:
    base = random_base(*family)
    layers = CollaborationConfig(layers="top:1") if keys.pop("collaborates", False) else CollaborationConfig()
    method = MethodConfig(variant=variant, collaboration=layers, **keys)
    model = start_model(base, method, 0, PIECES)
    assert isinstance(model, ScaleForCausalLM)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=OLD, max_size=OLD))
def test_what_a_base_says_of_new_tokens_is_taken_from_their_first_pieces_alone(row: list[float]) -> None:
    logits = torch.tensor(row)
    before = logits.double().log_softmax(-1)
    after = PieceShares(PIECES.first, PIECES.own_pieces)(logits).double().log_softmax(-1)

    first = torch.tensor(PIECES.first)
    others = torch.ones(OLD, dtype=torch.bool)
    others[PIECES.own_pieces] = False
    assert torch.allclose(after[:OLD][others], before[others], atol=2e-6)  # the space's piece among them
    for piece in PIECES.own_pieces:
        group = torch.cat([after[piece : piece + 1], after[OLD:][first == piece]])
        assert torch.allclose(group, group[0], atol=2e-6)
        assert torch.allclose(group.logsumexp(0), before[piece], atol=4e-6)
    of_space = after[OLD:][first == 3] - before[3]
    assert torch.allclose(of_space, torch.tensor(-20 * math.log(2), dtype=torch.float64), atol=4e-6)


@families
@pytest.mark.parametrize(("variant", "collaborates"), [("preserve", False), ("route", False), ("route", True)])
def test_base_logits_are_bitwise_and_the_loss_is_that_of_the_logits(
    family: Any, variant: str, collaborates: bool
) -> None:
    model = grown(variant, *family, collaborates=collaborates)
    old_ids = torch.randint(OLD, (2, 11), generator=torch.Generator().manual_seed(1))
    ids = torch.randint(ALL, (2, 11), generator=torch.Generator().manual_seed(2))
    states = model.final_states(old_ids, preserved=True)
    assert torch.equal(model.base_logits(states), model.base(input_ids=old_ids).logits)

    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model.adaptation_logits(model.final_states(ids, preserved=False))
    assert logits.shape[-1] == ALL
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == trained.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    assert "expansion.new_tokens.lm_head.weight" in trained
    for name, parameter in trained.items():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-5), name


@families
@pytest.mark.parametrize("collaborates", [False, True])
def test_an_expansion_upon_one_with_new_tokens_has_them_and_trains_alone(family: Any, collaborates: bool) -> None:
    below = grown("route", *family, collaborates=collaborates)
    ids = torch.randint(ALL, (2, 11), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = below.adaptation_logits(below.final_states(ids, preserved=False))
    model = start_model(below, MethodConfig(variant="route"), 0)
    assert isinstance(model, ScaleForCausalLM)
    assert all(name.startswith("expansion.") for name, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in model.expansion.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        states = model.eval().final_states(ids, preserved=True)
        base, adapted = model.routed_logits(states)
        assert torch.equal(base, before)
        assert torch.equal(model.head_logits(ids)(slice(None))[0], before)
        expected = torch.nn.functional.cross_entropy(adapted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert torch.allclose(model.train()(input_ids=ids, labels=ids).loss, expected, atol=1e-5)
        if not collaborates:
            plain = plain_model(model.eval(), "float32", [ids])
            assert torch.allclose(plain(input_ids=ids).logits, adapted, atol=1e-4)


@families
def test_new_rows_are_the_mean_of_their_pieces_at_the_length_of_such_rows(family: Any) -> None:
    model = grown("preserve", *family)
    assert model.expansion.new_tokens is not None
    rows, old = model.expansion.new_tokens.embed_tokens.weight, model.root.model.embed_tokens(torch.arange(OLD))
    size = old[[3, 5, 7, 8, 9]].norm(dim=1).median()
    for row, pieces in zip(rows, PIECES.new_tokens, strict=True):
        mean = old[[int(piece) for piece in pieces.split()]].mean(0)
        assert torch.allclose(row, mean / mean.norm() * size, atol=1e-5)
    assert not rows.requires_grad


@families
def test_full_fine_tuning_of_new_tokens_is_scored_beside_the_same_base(family: Any) -> None:
    base = random_base(*family, tie_word_embeddings=True)
    before = base(input_ids=torch.tensor([[1, 3, 7, 5]])).logits
    widened = grown("route", *family)
    full = start_model(random_base(*family), MethodConfig(variant="full"), 0, None)
    assert full.lm_head.weight.shape[0] == OLD

    model = start_model(base, MethodConfig(variant="full"), 0, PIECES)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model(input_ids=torch.tensor([[1, 3, 7, 5]])).logits[..., :OLD], before)

    new = torch.arange(OLD, ALL)
    assert torch.allclose(model.model.embed_tokens(new), PIECES.rows(widened.root).embed_tokens(new - OLD), atol=1e-5)
    plain = widened.root
    beside = BaseAndTrained(BaseOfNewTokens(plain, PIECES.rows(plain), widened.config), plain)
    ids = torch.randint(ALL, (1, 9), generator=torch.Generator().manual_seed(4))
    states = beside.base.get_decoder()(ids, use_cache=False).last_hidden_state
    logits = beside.base.get_output_embeddings()(states)
    routed = widened.head_logits(ids)(slice(None))[0]
    assert torch.allclose(logits, routed, atol=1e-5)
