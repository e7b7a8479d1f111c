"""Average, lookahead and decay to the base are their papers' formulas, and a resumed run has their state."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_cli.config.training import TrainConfig
from scale_cli.methods.recipes import Update
from scripts.research.average import Average
from tests.research.registered.test_adept import ADEPT
from tests.steps import Steps, batches_of, training_of
from tests.training.conftest import MakeConfig, are_equal, finished, go_on, trained
from tests.widening import tiny_llama

OSF = ("method.variant=osf", "method.collaboration.layers=null")
FULL = (
    "method.variant=full",
    "method.collaboration.layers=null",
    "train.decay_to_base=0.5",
    "train.weight_decay=0",
)


@settings(max_examples=60)
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
    if kind == "tail" or max_steps <= steps:
        behind = (min(steps, max_steps) - 1) / 2
    else:  # the mean of the first `steps`, which lies (steps - 1) / 2 back, then a share 1/steps of every further one
        kept, further = 1 - 1 / steps, max_steps - steps
        behind = (steps - 1) / 2 * kept**further + kept / (1 - kept) * (1 - kept**further)
    torch.testing.assert_close(parameter.data, start + slope * (max_steps - 1 - behind))


def test_lookahead_and_decay_to_the_base_are_their_formulas_around_adamws_steps() -> None:
    plainly = {
        "max_steps": 5,
        "lr": 1e-2,
        "weight_decay": 0.0,
        "schedule": "constant",
    }
    recipes = {"decay_to_base": 2.0, "lookahead": {"every_steps": 2, "share": 0.3}}
    ours, plain = (tiny_llama(vocab_size=64).requires_grad_(True) for _ in range(2))
    train = TrainConfig.model_validate({**plainly, **recipes})
    without = TrainConfig.model_validate(plainly)
    steps, reference = (
        Steps(model, keys, batches_of(4)) for model, keys in ((ours, train), (plain, without))
    )
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    slow: dict[str, torch.Tensor] = {}
    for step in range(5):
        steps.take(step).result()
        if step % 2 == 0:
            slow = {name: p.detach().clone() for name, p in plain.named_parameters()}
        loss_at = {name: p.detach().clone() for name, p in plain.named_parameters()}
        reference.take(step).result()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.sub_(1e-2 * 2.0 * (loss_at[name] - start[name]))
                if step % 2 == 1:
                    p.copy_(slow[name] + 0.3 * (p - slow[name]))
    expected = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["osf", "adept", "full"])
def test_a_run_that_goes_on_ends_as_the_uninterrupted_one_bitwise(
    make_config: MakeConfig, kind: str
) -> None:
    recipes = ("train.lookahead={every_steps: 2}", "train.average={kind: tail, steps: 7}")
    of_method = {"osf": OSF, "adept": ADEPT, "full": FULL}[kind]
    config = make_config("run", *of_method, *recipes, "train.keep_checkpoints=9")
    run = finished(config)
    whole = trained(run.final)
    last, before = (trained(run.checkpoint(step)) for step in (9, 6))
    assert are_equal(last, whole) and not are_equal(before, whole)
    for folder in (run.final, run.checkpoint(9), run.checkpoint(6)):
        shutil.rmtree(folder)
    go_on(config)
    assert are_equal(trained(run.final), whole)
