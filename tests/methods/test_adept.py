"""ADEPT copies the layers that its own code does, at the rates of the official steps: mean |theta| |g|, then 2 .. 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import MicroBatch
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import RunFolderError
from scale_cli.methods import adept
from scale_cli.methods.adept import Adept, AdeptConfig, bypass_losses, rates_by
from scale_cli.methods.recipes import Update, trainable_parameters
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.method_folder import read_method
from scale_cli.runs.opened import Run
from scale_cli.storage.atomic import load_tensors
from scale_cli.training.checkpoint import check_init_from
from scale_cli.training.objective import for_training
from scale_cli.training.optimiser import build_optimiser, set_learning_rate
from scale_cli.training.step import hooks_of
from scale_cli.upscale.building import start_model
from tests.model.test_families import tiny
from tests.training.conftest import MakeConfig
from tests.widening import TINY, move, tiny_llama

ADEPT = (
    "method.variant=adept",
    "method.collaboration.layers=null",
    "method.adept={num_blocks: 2, probe_windows: 2, every_steps: 4}",
    "corpus.sources.1.role=replay",
    "corpus.sources.1.weight=0",
)


def windows(number: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TINY["vocab_size"], (number, 12), generator=generator)
    return [MicroBatch(row[None, :-1], row[None, 1:], torch.tensor([0])) for row in ids]


@pytest.mark.parametrize(
    "family", ["llama, tied, biases", "qwen2, upper layers windowed", "gemma3_text"]
)
@torch.no_grad()
def test_a_layers_score_is_the_loss_where_all_its_weights_are_zero_and_copied_are_those_that_hurt_least(
    family: str,
) -> None:
    model, probe = tiny(family), windows(3)
    found = bypass_losses(model, probe)
    for number in (1, 2, 3):
        layers = Adept().find(AdeptConfig(num_blocks=number), model, probe).layers
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
def test_every_tensor_has_the_rate_that_the_official_steps_give_it(optimiser: str) -> None:
    method = MethodConfig.model_validate(
        {"variant": "adept", "adept": {"layers": [0, 2], "every_steps": 4}}
    )
    model, probe = start_model(tiny_llama(), method, 0), windows(3)
    trained = trainable_parameters(model)
    move(model, 0.05)
    config = TrainConfig.model_validate({"max_steps": 9, "optimiser": optimiser, "lr": 0.5})
    optim = build_optimiser(model, config, by_tensor=True)
    accelerator, start = Accelerator(cpu=True), dict[str, torch.Tensor]()
    (hook,) = hooks_of(
        method, config, model, for_training(model, config), accelerator, start, lambda _: probe
    )
    set_learning_rate(optim, 0.5)
    hook.before(Update(4, optim, torch.tensor(True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    sums: dict[str, Any] = {}
    for window in probe:
        model.zero_grad()
        model(window.input_ids, labels=window.targets, shift_labels=window.targets).loss.backward()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad.abs()
    matters = {
        name: (parameter.abs() * sums[name] / 3).mean().item()
        for name, parameter in trained.items()
    }
    highest, lowest = max(matters.values()), min(matters.values())
    rates = {
        id(group["params"][0]): group["lr"]
        for group in optim.param_groups
        if len(group["params"]) == 1
    }
    assert len(rates) == len(matters) == 2 * 9
    for name, parameter in trained.items():
        expected = 0.5 * 2 * (highest - matters[name]) / (highest - lowest)
        assert rates[id(parameter)] == pytest.approx(expected, rel=1e-3, abs=1e-5), name


def test_where_all_tensors_matter_the_same_or_one_is_not_finite_all_have_the_rate_of_the_run() -> (
    None
):
    assert rates_by([2.0, 2.0]) == [1.0, 1.0]
    assert rates_by([2.0, 1.0, float("nan")]) == [1.0] * 3


def measured_rates(checkpoint: Path) -> tuple[float, ...]:
    """Return what every tensor's rate is multiplied by."""
    kept = load_tensors(checkpoint / "optimiser.safetensors")
    return tuple(float(kept[name]) for name in sorted(kept) if name.startswith("tensor_rate."))


def test_a_run_measures_when_it_is_due_and_keeps_the_layers_it_found_which_a_branch_has_to_name(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lines = make_config("run", *ADEPT), list[str]()
    upscale(config, lines.append)
    assert "layers copied: " in "\n".join(lines)
    train(config, None, lambda _: None)
    run = RunFolder(config.output_dir)
    rates = {step: measured_rates(run.checkpoint(step)) for step in (6, 9)}
    assert len(set(rates.values())) == 2 and all(
        min(r) == 0.0 and max(r) == 2.0 for r in rates.values()
    )
    layers = read_method(run.upscaled).settings.layers
    assert layers is not None and read_method(run.final).settings.layers == layers
    tokens = TokenLedger.load(run.final).sources
    assert tokens["tiny"].num_trained == 0 < tokens["petitions"].num_trained

    branch = make_config("branch", *ADEPT, f"train.init_from={run.final}")
    monkeypatch.setattr(
        adept, "bypass_losses", lambda *_: [float(layer in layers) for layer in range(5)]
    )
    upscale(branch)
    with pytest.raises(
        RunFolderError, match=rf"layers copied: {', '.join(map(str, layers))}; but this run"
    ) as caught:
        train(branch, None, lambda _: None)
    assert "\n" not in str(caught.value)
    check_init_from(
        Run(
            make_config(
                "named", *ADEPT, f"method.adept.layers={layers}", f"train.init_from={run.final}"
            )
        )
    )
