"""What tests/training/test_sharding.py leaves out: more methods, and four processes that shard or go on."""

from pathlib import Path

import pytest
import torch

from scale_cli.commands.train import train
from scale_cli.methods.recipes import trainable_parameters
from scale_cli.training.metrics_log import EVALUATION
from tests.training.test_sharding import (
    EVALUATED,
    NEW_TOKENS,
    Runs,
    check_checkpoint,
    exact_products,
    no_runs,
)
from tests.widening import load_model

PAIRS = {
    "full": ("all", "method.variant=full", *NEW_TOKENS),
    "freeze": ("expansion", "method.variant=freeze", "method.freeze.num_layers=1", *EVALUATED),
    "llama-pro": ("expansion", "method.variant=llama-pro"),
    # Of batches cut alike: products in bfloat16 show how they are cut. Muon would magnify their rounding.
    "lowered": (
        "all",
        "train.mixed_precision=bf16",
        "train.optimiser=adamw",
        "model.dtype=bfloat16",
        "train.micro_batch_size=2",
    ),
    # In generated code, each layer by itself.
    "compiled": ("all", "train.compile=true", *EVALUATED),
    "distilled": (
        "expansion",
        "method.collaboration.layers=null",
        "method.distillation.weight=0.5",
        "corpus.sources.1.role=replay",
    ),
}


@pytest.fixture(scope="module")
@exact_products()
def runs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = no_runs(shared_data, tmp_path_factory)
    train(made.add("one"), None, print)
    for name, pair in PAIRS.items():
        made.add_pair(name, *pair)
    made.add("all-two", "train.micro_batch_size=2", "train.sharding=all", like="one")
    checkpointed = (
        "train.activation_checkpointing=true",
        "train.sharding=all",
        "train.micro_batch_size=1",
    )
    made.add("checkpointed-four", *checkpointed, like="one")
    node = ("train.sharding=all", "train.sharded_within=node", "train.micro_batch_size=1")
    made.add("node-four", *node, like="one")
    made.add("expansion-four", "train.micro_batch_size=1", "train.sharding=expansion", like="one")
    with made.training_in_processes(2):
        for name in PAIRS:
            train(made.configs[f"{name}-one"], None, print)
    made.add_cut("all-two-then-four", micro_batch_size=1)
    with made.training_in_processes(4):
        pass
    return made


@pytest.mark.parametrize(
    ("name", "as_in"),
    [
        *((f"{name}-two", f"{name}-one") for name in PAIRS),
        ("expansion-four", "one"),
        ("node-four", "one"),
        ("checkpointed-four", "one"),
        ("all-two-then-four", "one"),
    ],
)
def test_more_methods_and_four_processes_have_the_losses_and_weights_of_one(
    runs: Runs, name: str, as_in: str
) -> None:
    # The rounding of a lowered run shows in its weights.
    runs.check_as(name, as_in, weights=name != "lowered-two")


def test_of_two_machines_that_hold_the_same_shards_one_writes_them(runs: Runs) -> None:
    check_checkpoint(runs, "node-four", num_shards=4)


def test_compiled_or_not_losses_are_those_of_one_process(runs: Runs) -> None:
    for name in ("compiled-one", "compiled-two"):
        assert runs.logged(name, "loss") == pytest.approx(runs.logged("one", "loss"), rel=1e-5)


def test_periodic_evaluation_of_a_frozen_half_is_that_of_one_process(runs: Runs) -> None:
    (expected,), (found,) = (
        runs.logged(f"freeze-{number}", EVALUATION) for number in ("one", "two")
    )
    assert found["tiny"] == pytest.approx(expected["tiny"], rel=1e-5)
    assert found["tiny"]["base"] == expected["tiny"]["base"]


def test_one_process_loads_a_checkpoint_of_four_as_a_model(runs: Runs) -> None:
    model = load_model(
        runs.folder("expansion-four").checkpoint(3), runs.configs["expansion-four"].model
    )
    trained, expected = trainable_parameters(model), runs.trained("expansion-four")
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[key], tensor) for key, tensor in expected.items())
