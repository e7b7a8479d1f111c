"""Lookahead, decay to the base and the bound of E' are their formulas, applied by loops of their own here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError
from scale_cli.methods.recipes import BoundedRows, Lookahead, copy_start
from scale_cli.training.optimiser import build_optimiser, optimiser_tensors, trainable_parameters
from scale_cli.training.step import train_step
from scale_cli.upscale.method import start_model
from tests.hooks import around, hooks_for, training_of
from tests.training.test_muon import give_gradients, methods, model_of
from tests.training.test_step import batches_of
from tests.widening import tiny_llama, widen


def train_of(**keys: Any) -> TrainConfig:
    return TrainConfig.model_validate({"max_steps": 20, "lr": 1e-2, "schedule": "constant", **keys})


@methods
def test_lookahead_is_the_loop_of_its_paper_around_any_optimiser(method: dict[str, Any]) -> None:
    model = model_of(method)
    other = copy.deepcopy(model)
    train = train_of(lookahead={"every_steps": 3, "share": 0.3}, optimiser="muon")
    optimiser, inner = build_optimiser(model, train), build_optimiser(other, train)
    fast = trainable_parameters(other)
    slow = {name: parameter.detach().clone() for name, parameter in fast.items()}
    hooks = [Lookahead(training_of(train))]
    for step in range(7):
        give_gradients(model, step)
        with around(hooks, optimiser, step):
            optimiser.step()
        give_gradients(other, step)
        inner.step()
        if (step + 1) % 3 == 0:
            for name, parameter in fast.items():
                slow[name] += 0.3 * (parameter.detach() - slow[name])
                parameter.data.copy_(slow[name])
    for name, parameter in trainable_parameters(model).items():
        torch.testing.assert_close(parameter, fast[name])
    moments = optimiser_tensors(inner, other)
    assert optimiser_tensors(optimiser, model).keys() == moments.keys() | {f"slow.{name}" for name in fast}


@pytest.mark.parametrize("variant", ["full", "freeze", "llama-pro"])
def test_what_decays_to_the_base_is_the_base_and_a_difference_that_decays_to_zero(variant: str) -> None:
    method = MethodConfig.model_validate({"variant": variant, "freeze": {"num_layers": 1}})
    model = start_model(tiny_llama(vocab_size=64), method, 0)
    other, train = copy.deepcopy(model), train_of(decay_to_base=True, weight_decay=20.0, max_grad_norm=1e9)
    start = copy_start(model, train)
    optimiser, hooks = build_optimiser(model, train), hooks_for(model, train, method)
    trained = trainable_parameters(other)
    differences = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in start.items()}
    adamw = torch.optim.AdamW(differences.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=20.0)
    for step in range(3):
        train_step(Accelerator(cpu=True), model, optimiser, batches_of(4).of_step(step), train, hooks=hooks)
        for name, parameter in trained.items():
            parameter.data.copy_(start[name] + differences[name].detach())
        for batch in batches_of(4).micro_batches(step):
            labels = {"labels": batch.targets, "shift_labels": batch.targets}
            num_tokens = sum(batches_of(4).num_targets(step))
            other(batch.input_ids, **labels, num_items_in_batch=num_tokens, use_cache=False).loss.backward()
        for name, parameter in trained.items():
            differences[name].grad, parameter.grad = parameter.grad, None
        adamw.step()
    for name, parameter in trainable_parameters(model).items():
        torch.testing.assert_close(parameter.detach(), start[name] + differences[name].detach(), atol=2e-5, rtol=1e-4)
        assert not torch.equal(parameter, start[name])


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_bounded_rows_keep_their_direction_and_nothing_else_is_touched(optimiser: str) -> None:
    model = widen(tiny_llama(vocab_size=64), "route")
    other = copy.deepcopy(model)
    free, bounded = (train_of(optimiser=optimiser, embedding_norm=norm) for norm in ("free", "bounded"))
    accelerator, batch = Accelerator(cpu=True), batches_of(4).of_step(0)
    train_step(accelerator, model, build_optimiser(model, free), batch, free)
    train_step(accelerator, other, build_optimiser(other, bounded), batch, bounded, hooks=hooks_for(other, bounded))
    bound = model.config.expansion_embedding_rms
    for name, parameter in trainable_parameters(other).items():
        expected = trainable_parameters(model)[name].detach()
        if name == "expansion.embed_tokens.weight":
            rms = expected.square().mean(dim=1).sqrt()
            assert rms.max() > bound > rms.min()
            expected = torch.where(rms[:, None] > bound, expected * (bound / rms)[:, None], expected)
        torch.testing.assert_close(parameter.detach(), expected)


def test_a_step_that_is_not_finite_leaves_rows_beyond_their_bound_too() -> None:
    model, train = widen(tiny_llama(vocab_size=64), "route"), train_of(embedding_norm="bounded")
    model.expansion.norm.weight.data.fill_(torch.nan)
    before = model.expansion.embed_tokens.weight.detach().clone()
    assert before.square().mean(dim=1).sqrt().max() > model.config.expansion_embedding_rms
    optimiser, hooks = build_optimiser(model, train), hooks_for(model, train)
    train_step(Accelerator(cpu=True), model, optimiser, batches_of(4).of_step(0), train, hooks=hooks)
    assert torch.equal(model.expansion.embed_tokens.weight, before)


def test_an_embedding_that_began_before_it_had_a_size_is_not_bounded() -> None:
    model = widen(tiny_llama(vocab_size=64), "route", embedding_scale=None)
    with pytest.raises(ConfigError, match=r"train\.embedding_norm: E' of this run began without a size"):
        BoundedRows(training_of(train_of(embedding_norm="bounded"), model))
