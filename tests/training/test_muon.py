"""Muon on the matrices of every method, AdamW on the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.training.optimiser import (
    build_optimiser,
    load_optimiser_tensors,
    optimiser_tensors,
    set_learning_rate,
    trainable_parameters,
)
from scale_cli.upscale.method import MethodModel, start_model
from tests.widening import tiny_llama

TRAIN = TrainConfig(max_steps=8, optimiser="muon", lr=1e-2)
METHODS: list[dict[str, Any]] = [
    {"variant": "route", "collaboration": {"layers": "top:1"}},
    {"variant": "full"},
    {"variant": "lora"},
    {"variant": "llama-pro"},
]
methods = pytest.mark.parametrize("method", METHODS, ids=[method["variant"] for method in METHODS])


def model_of(method: dict[str, Any]) -> MethodModel:
    return start_model(tiny_llama(vocab_size=64), MethodConfig.model_validate(method), 0)


def give_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in trainable_parameters(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


@methods
def test_it_moves_matrices_as_torchs_muon_and_the_rest_as_adamw(method: dict[str, Any]) -> None:
    model = model_of(method)
    others = [copy.deepcopy(model) for _ in range(2)]
    matrices = [parameter for name, parameter in trainable_parameters(others[0]).items() if is_matrix(name, parameter)]
    muon = torch.optim.Muon(matrices, weight_decay=TRAIN.weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = build_optimiser(others[1], TrainConfig(max_steps=8, lr=1e-2))
    optimiser = build_optimiser(model, TRAIN)
    for step, lr in enumerate((1e-2, 3e-3, 1e-3)):
        optimiser.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]  # as a gradient scaler would
        for subject, optim in ((model, optimiser), (others[0], muon), (others[1], adamw)):
            give_gradients(subject, step)
            set_learning_rate(optim, lr)
            optim.step()
    by_muon, by_adamw = (trainable_parameters(other) for other in others)
    for name, parameter in trainable_parameters(model).items():
        assert torch.equal(parameter, (by_muon if is_matrix(name, parameter) else by_adamw)[name]), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
@methods
def test_the_state_is_of_what_trains_and_goes_back_bitwise(method: dict[str, Any], name: Any) -> None:
    model, settings = model_of(method), TRAIN.model_copy(update={"optimiser": name})
    optimiser = build_optimiser(model, settings)
    give_gradients(model, 0)
    optimiser.step()
    tensors = {name: tensor.clone() for name, tensor in optimiser_tensors(optimiser, model).items()}
    trained = trainable_parameters(model)
    matrices = {
        name for name, parameter in trained.items() if settings.optimiser == "muon" and is_matrix(name, parameter)
    }
    kept = {f"momentum_buffer.{name}" for name in matrices}
    kept |= {f"{moment}.{name}" for name in trained.keys() - matrices for moment in ("exp_avg", "exp_avg_sq", "step")}
    assert tensors.keys() == kept
    other = copy.deepcopy(model)
    restored = build_optimiser(other, settings)
    load_optimiser_tensors(restored, other, tensors)
    for subject, optim in ((model, optimiser), (other, restored)):
        give_gradients(subject, 1)
        optim.step()
    assert all(torch.equal(parameter, trainable_parameters(other)[name]) for name, parameter in trained.items())


@methods
def test_a_first_step_that_is_not_finite_leaves_weights_as_they_were_and_moments_of_nothing(
    method: dict[str, Any],
) -> None:
    model = model_of(method)
    before = {name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()}
    optimiser = build_optimiser(model, TRAIN)
    give_gradients(model, 0, torch.nan)
    optimiser.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]  # as a gradient scaler would
    optimiser.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainable_parameters(model).items())
    assert not any(tensor.any() for tensor in optimiser_tensors(optimiser, model).values())
