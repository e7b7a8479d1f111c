"""ADEPT's rates, held to the official code's steps: mean |theta| |g|, then 2 (max - I) / (max - min)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.schema import MethodConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.ledger import TokenLedger
from scale_cli.errors import RunFolderError
from scale_cli.export.dense import plain_model
from scale_cli.methods import adept
from scale_cli.methods.adept import rates_by
from scale_cli.methods.recipes import Update
from scale_cli.storage.atomic import load_tensors
from scale_cli.storage.records import RunFolder
from scale_cli.training.beginning import check_init_from
from scale_cli.training.optimiser import build_optimiser, set_learning_rate, trainable_parameters
from scale_cli.training.step import hooks_of
from scale_cli.upscale.method import read_method, start_model
from scale_cli.upscale.objective import for_training
from scale_cli.upscale.run import Run
from tests.methods.test_adept import windows
from tests.training.conftest import MakeConfig, are_equal, go_on, trained
from tests.widening import load_model, tiny_llama

ADEPT = (
    "method.variant=adept",
    "method.collaboration.layers=null",
    "method.adept={num_blocks: 2, probe_windows: 2, every_steps: 4}",
    "corpus.sources.1.role=replay",
    "corpus.sources.1.weight=0",
)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_every_tensor_has_the_rate_that_the_official_steps_give_it(optimiser: str) -> None:
    method = MethodConfig.model_validate({"variant": "adept", "adept": {"layers": [0, 2], "every_steps": 4}})
    model, probe = start_model(tiny_llama(), method, 0), windows(3)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    config = TrainConfig.model_validate({"max_steps": 9, "optimiser": optimiser, "lr": 0.5})
    optim = build_optimiser(model, config, by_tensor=True)
    accelerator, start = Accelerator(cpu=True), dict[str, torch.Tensor]()
    (hook,) = hooks_of(method, config, model, for_training(model, config), accelerator, start, lambda _: probe)
    set_learning_rate(optim, 0.5)
    hook.before(Update(4, optim, torch.tensor(True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    sums: dict[str, Any] = {}
    for window in probe:
        model.zero_grad()
        model(window.input_ids, labels=window.targets, shift_labels=window.targets).loss.backward()
        for name, parameter in trainable_parameters(model).items():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad.abs()
    matters = {n: (p.abs() * sums[n] / 3).mean().item() for n, p in trainable_parameters(model).items()}
    highest, lowest = max(matters.values()), min(matters.values())
    rates = {id(group["params"][0]): group["lr"] for group in optim.param_groups if len(group["params"]) == 1}
    assert len(rates) == len(matters) == 2 * 9
    for name, parameter in trainable_parameters(model).items():
        expected = 0.5 * 2 * (highest - matters[name]) / (highest - lowest)
        assert rates[id(parameter)] == pytest.approx(expected, rel=1e-3, abs=1e-5), name


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_rates_are_from_0_of_the_most_important_to_2_of_the_least(importances: list[float]) -> None:
    rates = rates_by(importances)
    if min(importances) == max(importances):
        assert set(rates) == {1.0}
    else:
        assert rates[importances.index(max(importances))] == 0.0 and rates[importances.index(min(importances))] == 2.0
        assert sorted(rates, reverse=True) == [rate for _, rate in sorted(zip(importances, rates, strict=True))]
    assert rates_by([*importances, float("nan")]) == [1.0] * (len(importances) + 1)


def measured_rates(checkpoint: Path) -> tuple[float, ...]:
    """Return what every tensor's rate is multiplied by."""
    kept = load_tensors(checkpoint / "optimiser.safetensors")
    return tuple(float(kept[name]) for name in sorted(kept) if name.startswith("tensor_rate."))


def test_a_run_measures_when_it_is_due_keeps_what_it_found_and_is_a_plain_deeper_model(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("run", *ADEPT)
    lines: list[str] = []
    upscale(config, lines.append)
    assert "layers copied: " in "\n".join(lines)
    train(config, None, lambda _: None)
    run = RunFolder(config.output_dir)
    rates = {step: measured_rates(run.checkpoint(step)) for step in (6, 9)}
    assert len(set(rates.values())) == 2 and all(min(r) == 0.0 and max(r) == 2.0 for r in rates.values())
    layers = read_method(run.upscaled).settings.layers
    assert layers is not None and read_method(run.final).settings.layers == layers
    plain = plain_model(load_model(run.final, config.model), "float32")
    assert type(plain).__name__ == "LlamaForCausalLM" and plain.config.num_hidden_layers == 3 + 2
    tokens = TokenLedger.load(run.final).sources
    assert tokens["tiny"].num_trained == 0 < tokens["petitions"].num_trained
    before = trained(run.final)
    run.final.rename(run.root / "put-aside")
    shutil.rmtree(run.checkpoint(9))
    go_on(config)
    assert are_equal(trained(run.final), before), "with the rates measured at 4"

    branch = make_config("branch", *ADEPT, f"train.init_from={run.final}")
    monkeypatch.setattr(adept, "bypass_losses", lambda *_: [float(layer in layers) for layer in range(5)])
    upscale(branch)
    with pytest.raises(
        RunFolderError, match=rf"layers copied: {', '.join(map(str, layers))}; in this run, found on other text, "
    ) as caught:
        train(branch, None, lambda _: None)
    assert "\n" not in str(caught.value)
    check_init_from(Run(make_config("named", *ADEPT, f"method.adept.layers={layers}", f"train.init_from={run.final}")))
