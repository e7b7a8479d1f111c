"""Recipes where `test_everything_at_once.py`, which holds all of them to their formulas, does not look."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.training import TrainConfig
from scale_cli.errors import ConfigError, RunFolderError
from scale_cli.methods.recipes import Average, BoundedRows, Update, of_final
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import load_tensors
from scale_cli.training.metrics_log import EVALUATION, read_records
from scale_cli.training.optimiser import build_optimiser
from scale_cli.training.step import train_step
from tests.hooks import hooks_for, training_of
from tests.training.conftest import MakeConfig, are_equal, finished, go_on, trained
from tests.training.test_step import batches_of
from tests.widening import tiny_llama, widen


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["ema", "tail"]), st.integers(1, 12), st.integers(1, 30))
def test_the_average_of_a_linear_sequence_is_its_closed_form(
    kind: str, steps: int, max_steps: int
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimiser = torch.optim.SGD([parameter])
    train = TrainConfig.model_validate(
        {"max_steps": max_steps, "average": {"kind": kind, "steps": steps}}
    )
    average = Average(training_of(train))
    start, slope = torch.tensor([5.0, -1.0]).double(), torch.tensor([2.0, 0.5]).double()
    for step in range(max_steps):
        parameter.data = start + slope * step
        average.after(Update(step, optimiser, torch.tensor(True)))
    last = max_steps - 1
    if kind == "tail" or max_steps <= steps:
        behind = (min(steps, max_steps) - 1) / 2
    else:  # the mean of the first `steps`, which lies (steps - 1) / 2 back, then a share 1/steps of every further one
        kept, further = 1 - 1 / steps, max_steps - steps
        behind = (steps - 1) / 2 * kept**further + kept / (1 - kept) * (1 - kept**further)
    with of_final([average], optimiser):
        torch.testing.assert_close(parameter.data, start + slope * (last - behind))
    assert torch.equal(parameter.data, start + slope * last)


def averaged_run(make_config: MakeConfig, name: str, *overrides: str) -> RunFolder:
    return finished(
        make_config(
            name,
            "train.max_steps=4",
            "train.save_every_steps=1",
            "train.keep_checkpoints=9",
            *overrides,
        )
    )


def test_final_holds_the_average_and_everything_else_is_as_without_one(
    make_config: MakeConfig,
) -> None:
    evaluated = "train.eval_every_steps=2"
    plain = averaged_run(make_config, "plain", evaluated)
    tail = averaged_run(make_config, "tail", evaluated, "train.average={kind: tail, steps: 2}")
    third, last = (trained(tail.checkpoint(step)) for step in (3, 4))
    for name, tensor in trained(tail.final).items():
        torch.testing.assert_close(tensor, (third[name] + last[name]) / 2)
    for step in (2, 4):
        assert are_equal(trained(plain.checkpoint(step)), trained(tail.checkpoint(step)))
    moments = [
        load_tensors(run.checkpoint(4) / "optimiser.safetensors").keys() for run in (plain, tail)
    ]
    assert moments[1] - moments[0] == {f"average.{name}" for name in last}
    assert not load_tensors(tail.checkpoint(2) / "optimiser.safetensors").keys() - moments[0]
    without, with_one = (
        {record["step"]: record for record in read_records(r.metrics) if EVALUATION in record}
        for r in (plain, tail)
    )
    measured_alike = [
        step for step in (2, 4) if with_one[step][EVALUATION] == without[step][EVALUATION]
    ]
    assert measured_alike == [2], "measured is what final/ would hold"


def test_a_longer_run_has_an_average_of_its_own_last_steps_or_is_refused(
    make_config: MakeConfig,
) -> None:
    average = "train.average={kind: tail, steps: 3}"
    run = averaged_run(make_config, "run", average)
    with pytest.raises(
        RunFolderError,
        match=r"should have begun at step 4, and has not; .* set train\.max_steps to at least 7",
    ):
        go_on(make_config("run", "train.max_steps=6", average), "train.max_steps")
    kept = ("train.save_every_steps=1", "train.keep_checkpoints=9")
    go_on(make_config("run", "train.max_steps=8", *kept, average), "train.max_steps")
    states = {
        step: load_tensors(run.checkpoint(step) / "optimiser.safetensors") for step in (5, 6, 7, 8)
    }
    averaged = [
        step for step, state in states.items() if any(key.startswith("average.") for key in state)
    ]
    assert averaged == [6, 7, 8], "the shorter run's average is of no step of this one"
    steps = [trained(run.checkpoint(step)) for step in (6, 7, 8)]
    for name, tensor in trained(run.final).items():
        torch.testing.assert_close(tensor, sum(step[name] for step in steps) / 3)


def bounded() -> TrainConfig:
    return TrainConfig(max_steps=20, lr=1e-2, embedding_norm="bounded")


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
