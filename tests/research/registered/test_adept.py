"""ADEPT copies the layers that its own code does, at the rates of the official steps: mean |theta| |g|, then 2 .. 0."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import IGNORED, PackedWindows
from scale_cli.methods.recipes import Training, Update, trainable_parameters
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, set_learning_rate
from scale_cli.upscale.building import start_model
from scripts.research.adept import (
    AdeptConfig,
    TensorRates,
    bypass_losses,
    known_windows,
    layers_to_copy,
)
from tests.model.test_families import tiny
from tests.widening import TINY, move, tiny_llama

ADEPT = (
    "method.variant=adept",
    "method.collaboration.layers=null",
    "method.adept={num_blocks: 2, probe_windows: 2, every_steps: 4}",
    "corpus.sources.1.role=replay",
    "corpus.sources.1.weight=0",
)


def known() -> PackedWindows:
    ids = torch.randint(
        0, TINY["vocab_size"], (56,), generator=torch.Generator().manual_seed(0)
    ).numpy()
    return PackedWindows(ids, 11)


@pytest.mark.parametrize(
    "family", ["llama, tied, biases", "qwen2, upper layers windowed", "gemma3_text"]
)
@torch.no_grad()
def test_a_layers_score_is_the_loss_where_all_its_weights_are_zero_and_copied_are_those_that_hurt_least(
    family: str,
) -> None:
    model, probe = tiny(family), known_windows([known()], 0, 3)
    found = bypass_losses(model, probe)
    for number in (1, 2, 3):
        layers = layers_to_copy(model, probe, AdeptConfig(num_blocks=number))
        assert layers == sorted(sorted(range(3), key=found.__getitem__)[:number])
    for index, layer in enumerate(model.model.layers):
        kept = [(parameter, parameter.clone()) for parameter in layer.parameters()]
        for parameter, _ in kept:
            parameter.zero_()
        losses = [model(w.input_ids, labels=w.targets, shift_labels=w.targets).loss for w in probe]
        assert found[index] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
        for parameter, before in kept:
            parameter.copy_(before)
    assert len(set(found)) == len(model.model.layers)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_every_tensor_changes_by_the_rate_that_the_official_steps_give_it(optimiser: str) -> None:
    adept = {"layers": [0, 2], "every_steps": 4, "probe_windows": 3}
    method = MethodConfig.model_validate({"variant": "adept", "adept": adept})
    model = start_model(tiny_llama(), method, 0)
    trained = trainable_parameters(model)
    move(model, 0.05)
    train = TrainConfig.model_validate({"max_steps": 9, "optimiser": optimiser, "lr": 0.5})
    optim = build_optimiser(model, train)
    sources = [SimpleNamespace(role="replay")]
    training = Training(
        config=SimpleNamespace(train=train, seed=0, corpus=SimpleNamespace(sources=sources)),
        model=model,
        wrapped=for_training(model, train),
        accelerator=Accelerator(cpu=True),
        batches=SimpleNamespace(sources=[known()]),
    )
    hook, update = TensorRates(method.settings, training), Update(4, optim, torch.tensor(True))
    sums: dict[str, Any] = {}
    for window in known_windows([known()], 0, 3):
        model.zero_grad()
        targets = window.targets
        assert (targets != IGNORED).all()
        model(window.input_ids, labels=targets, shift_labels=targets).loss.backward()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad.abs()
    matters = {
        name: (parameter.abs() * sums[name] / 3).mean().item()
        for name, parameter in trained.items()
    }
    highest, lowest = max(matters.values()), min(matters.values())
    assert len(matters) == 2 * 9

    hook.before(update)
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    set_learning_rate(optim, 0.5)
    optim.step()
    changes = {name: parameter.detach() - before[name] for name, parameter in trained.items()}
    hook.after(update)
    for name, parameter in trained.items():
        rate = 2 * (highest - matters[name]) / (highest - lowest)
        torch.testing.assert_close(
            parameter.detach(), before[name] + rate * changes[name], rtol=1e-3, atol=1e-4, msg=name
        )
