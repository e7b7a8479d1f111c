"""Recipes where `test_everything_at_once.py`, which holds them to their formulas, does not look."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.methods.recipes import BoundedRows
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import train_step
from tests.hooks import hooks_for, training_of
from tests.training.test_step import batches_of
from tests.widening import tiny_llama, widen


def bounded() -> TrainConfig:
    return TrainConfig.model_validate({"max_steps": 20, "lr": 1e-2, "embedding_norm": "bounded"})


def test_a_step_that_is_not_finite_leaves_rows_beyond_their_bound_too() -> None:
    model: Any = widen(tiny_llama(vocab_size=64), "route")
    model.expansion.norm.weight.data.fill_(torch.nan)
    before = model.expansion.embed_tokens.weight.detach().clone()
    assert before.square().mean(dim=1).sqrt().max() > model.config.expansion_embedding_rms
    optimiser, hooks = build_optimiser(model, bounded()), hooks_for(model, bounded())
    train_step(
        Accelerator(cpu=True), model, optimiser, batches_of(4).of_step(0), bounded(), hooks=hooks
    )
    assert torch.equal(model.expansion.embed_tokens.weight, before)


def test_an_embedding_that_began_before_it_had_a_size_is_not_bounded() -> None:
    model = widen(tiny_llama(vocab_size=64), "route", embedding_scale=None)
    with pytest.raises(
        ConfigError, match=r"train\.embedding_norm: this run started E' without embedding_scale"
    ):
        BoundedRows(training_of(bounded(), model))
