"""Recipes where `test_everything_at_once.py`, which holds them to their formulas, does not look."""

import torch

from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import BoundedRows, Update
from tests.steps import Steps, batches_of, training_of
from tests.widening import UNKNOWN, tiny_llama, widen


def bounded() -> TrainConfig:
    return TrainConfig.model_validate({"max_steps": 20, "lr": 1e-2, "embedding_norm": "bounded"})


def test_a_step_that_is_not_finite_leaves_rows_beyond_their_bound_too() -> None:
    model = widen(tiny_llama(vocab_size=64), "route", text=UNKNOWN)
    model.expansion.norm.weight.data.fill_(torch.nan)
    before = model.expansion.embed_tokens.weight.detach().clone()
    assert before.square().mean(dim=1).sqrt().max() > model.config.start["embedding_rms"]
    Steps(model, bounded(), batches_of(4)).take(0)
    assert torch.equal(model.expansion.embed_tokens.weight, before)


def test_an_embedding_that_starts_at_zero_is_not_bounded() -> None:
    model = widen(tiny_llama(vocab_size=64), "route")
    model.expansion.embed_tokens.weight.data.fill_(7.0)
    finite = torch.tensor(True)
    BoundedRows(training_of(bounded(), model)).after(Update(0, None, finite))
    assert (model.expansion.embed_tokens.weight == 7.0).all()
