from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from scale_cli.config.training import TrainConfig
from scale_cli.training.optimiser import build_optimiser, trainable_parameters
from scale_cli.training.step import measured_update_norm
from tests.widening import tiny_llama, widen


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_update_norm_is_that_of_what_a_step_changed_and_measuring_changes_nothing(
    optimiser: Any, found_inf: float
) -> None:
    ids = torch.arange(24).view(2, 12)
    after = []
    for measures in (True, False):
        model = widen(tiny_llama(), "route").train()
        stepper: Any = build_optimiser(model, TrainConfig(max_steps=9, lr=1e-2, optimiser=optimiser))
        for _ in range(2):  # the second has moments
            model(input_ids=ids, labels=ids).loss.backward()
            before = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
            stepper.found_inf = torch.tensor(found_inf)
            if measures:
                with measured_update_norm(stepper) as norms:
                    stepper.step()
                moved = [p.detach() - before[name] for name, p in trainable_parameters(model).items()]
                expected = math.sqrt(sum(float(of_one.double().square().sum()) for of_one in moved))
                assert [float(norm) for norm in norms] == [pytest.approx(expected, rel=1e-5)]
                assert (expected > 0.0) == (found_inf == 0.0)
            else:
                stepper.step()
            stepper.zero_grad()
        after.append(torch.cat([p.detach().flatten() for p in trainable_parameters(model).values()]))
    assert torch.equal(*after)
